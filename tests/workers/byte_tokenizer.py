"""A tokenizer that needs no library: a byte is a token, and 256 stands between documents."""

from pathlib import Path
from typing import Any, NamedTuple


class Encoded(NamedTuple):
    ids: list[int]


class ByteTokenizer:
    """What `write_shards` asks of one of `tokenizers`."""

    separator = 256

    def __init__(self, above: int = 0) -> None:
        """above: entries of the vocabulary that no text has."""
        self._above = above

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        assert with_added_tokens
        return {str(token): token for token in range(257 + self._above)}

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Encoded]:
        assert not add_special_tokens
        return [Encoded(list(text.encode())) for text in texts]

    def save(self, path: str) -> None:
        Path(path).write_text(f"bytes and {self._above}")


def documents_of(tokens: Any) -> list[str]:
    """Texts of tokens, each of which ends with the separator."""
    found: list[bytearray] = [bytearray()]
    for token in tokens.tolist():
        if token == ByteTokenizer.separator:
            found.append(bytearray())
        else:
            found[-1].append(token)
    assert not found.pop()
    return [text.decode() for text in found]
