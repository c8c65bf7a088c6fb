"""Byte-pair vocabularies, by the library `tokenizers`: training, loading, encoding and decoding."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.optional import library

# Separator of a vocabulary trained here. Where it occurs in a text it separates documents too, as in concatenated
# dumps.
SEPARATOR = "<|endoftext|>"
_KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
# Pairs are never joined across these words, which are GPT-4's: a word with the blank before it, up to three digits,
# line ends.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS = r"(?:[^\w\r\n]|_)?[^\W\d_]"
# About the same words, and what stands between them, for Python's regular expressions.
_PARTS = re.compile(rf"{_LETTERS}+|[\W\d_]+?(?={_LETTERS}|\Z)")
# Number of different words that a vocabulary is trained on: the training takes about 1 KB of memory per word.
MAX_WORDS = 2**17
# Minimum number of different words used for each requested entry.
_WORDS_AN_ENTRY = 4
# All bytes and the separator.
MIN_VOCAB = 257
MAX_VOCAB = 2**24


def train(texts: Iterable[str], vocab: int) -> Any:
    """Train a tokenizer of at most `vocab` entries, fewer if the texts hold no more pairs.

    It can encode every text, and decoding restores it to the byte. The memory needed is that of the texts plus that of
    a bounded number of different words, whatever the texts are: if they hold more words, the most frequent are used.
    """
    tokenizers = library("tokenizers", "data", "a vocabulary")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    before = tokenizers.pre_tokenizers
    words = before.Split(tokenizers.Regex(_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = before.Sequence([words, before.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[SEPARATOR],
        initial_alphabet=before.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_of_few_words(texts, max(MAX_WORDS, _WORDS_AN_ENTRY * vocab)), trainer)
    return tokenizer


def _of_few_words(texts: Iterable[str], most: int) -> Iterator[str | list[str]]:
    """Yield the texts unchanged if they have at most `most` different words, otherwise only their most frequent words.

    Twice as many words are counted. Whenever there are more, the more frequent half is kept, so that late words are
    counted too.
    """
    held: list[bytes] = []  # bytes: a string with rare characters takes up to four times as much
    kept, dropped = Counter[str](), False
    for text in texts:
        held.append(text.encode())
        kept.update(_PARTS.findall(text))
        if len(kept) > 2 * most:
            kept, dropped = _most_frequent(kept, most), True
    if len(kept) > most:
        kept, dropped = _most_frequent(kept, most), True
    for text in map(bytes.decode, held):
        yield [part for part in _PARTS.findall(text) if part in kept] if dropped else text


def _most_frequent(words: Counter[str], most: int) -> Counter[str]:
    """Return the `most` most frequent words.

    A digest decides between equally frequent ones, so that they come from all over the texts.
    """
    ranked = sorted(words, key=lambda word: (-words[word], xxhash.xxh3_64_intdigest(word.encode())))
    return Counter({word: words[word] for word in ranked[:most]})


def file_of(path: Path) -> Path:
    """Return the tokenizer's file, given the file or its folder."""
    return path / "tokenizer.json" if path.is_dir() else path


def load(path: Path, extra: str = "data") -> Any:
    """Load a tokenizer's file, or a folder's `tokenizer.json`, made by any program of `tokenizers` or `transformers`.

    Truncation and padding are turned off, whatever the file says. extra: the extra that the user is told to install.

    Raises:
        UsageError: there is no tokenizer, or `tokenizers` is missing.
    """
    tokenizers = library("tokenizers", extra, str(path))
    file = file_of(path)
    if not file.is_file():
        raise UsageError(f"{file}: no such file; give a tokenizer.json, or a folder that has one")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise UsageError(f"{file} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def separator_of(tokenizer: Any, told: str | None) -> int:
    """Return the token that stands between documents.

    Raises:
        UsageError: the tokenizer has no known separator, or not that in `told`.
    """
    for name in _KNOWN_SEPARATORS if told is None else (told,):
        if (token := tokenizer.token_to_id(name)) is not None:
            return int(token)
    if told is not None:
        raise UsageError(f"the tokenizer does not have the token {told!r} to separate documents")
    raise UsageError(
        f"the tokenizer has none of {', '.join(_KNOWN_SEPARATORS)}: use --separator to choose which of its tokens "
        "separates documents"
    )


def entries(tokenizer: Any) -> int:
    """Return the size of the vocabulary: the largest token plus one."""
    return 1 + int(max(tokenizer.get_vocab(with_added_tokens=True).values()))


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each text, encoded on all cores; no separator is added."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of tokens; special tokens are skipped."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
