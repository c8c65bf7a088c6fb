"""A vocabulary of byte pairs, by the library `tokenizers`: trained, loaded, and used in both directions."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.optional import library

SEPARATOR = "<|endoftext|>"
"""Of a vocabulary trained here. Where it stands in a text, it is the separator too, as in dumps of documents."""
_KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What pairs are never joined across, as GPT-4 has it: words with the blank before them, three digits, line ends."""
_LETTERS = r"(?:[^\w\r\n]|_)?[^\W\d_]"
_PARTS = re.compile(rf"{_LETTERS}+|[\W\d_]+?(?={_LETTERS}|\Z)")
"""About the same words, and what stands between them, as Python finds them."""
MOST_WORDS = 2**17
"""Different words that a vocabulary is trained on: the training takes about 1 KB of memory for each."""
_WORDS_AN_ENTRY = 4
"""At least so many different words for each entry that is asked for."""
LEAST_VOCAB = 257
"""All bytes and the separator."""
MOST_VOCAB = 2**24


def train(texts: Iterable[str], vocab: int) -> Any:
    """A tokenizer of `vocab` entries at most, fewer where the texts hold no more pairs.

    No text is unknown to it, and what it decodes is what it encoded, to the byte. Memory is that of the texts
    and of many different words, whatever they are: of more words those that come most often are trained on.
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
    tokenizer.train_from_iterator(_of_few_words(texts, max(MOST_WORDS, _WORDS_AN_ENTRY * vocab)), trainer)
    return tokenizer


def _of_few_words(texts: Iterable[str], most: int) -> Iterator[str | list[str]]:
    """Texts as they are, if they have `most` different words at most; else those of their words that come most often.

    Twice as many are counted. When more come, the half that came more often is kept: late words find room too.
    """
    held: list[bytes] = []  # as large as its file, which a string with rare characters is not
    kept, dropped = Counter[str](), False
    for text in texts:
        held.append(text.encode())
        kept.update(_PARTS.findall(text))
        if len(kept) > 2 * most:
            kept, dropped = _most_often(kept, most), True
    if len(kept) > most:
        kept, dropped = _most_often(kept, most), True
    for text in map(bytes.decode, held):
        yield [part for part in _PARTS.findall(text) if part in kept] if dropped else text


def _most_often(words: Counter[str], most: int) -> Counter[str]:
    """So many of them. Of those that came equally often a digest decides, so that they are from all over the texts."""
    ranked = sorted(words, key=lambda word: (-words[word], xxhash.xxh3_64_intdigest(word.encode())))
    return Counter({word: words[word] for word in ranked[:most]})


def file_of(path: Path) -> Path:
    """That of a tokenizer, in a folder or given by itself."""
    return path / "tokenizer.json" if path.is_dir() else path


def load(path: Path, extra: str = "data") -> Any:
    """A tokenizer's file, or a folder with `tokenizer.json`, made by any program of `tokenizers` or `transformers`.

    It cuts and fills nothing, whatever the file says. extra: which the user is told to install.

    Raises:
        UsageError: there is none, or `tokenizers` is missing.
    """
    tokenizers = library("tokenizers", extra, str(path))
    file = file_of(path)
    if not file.is_file():
        raise UsageError(f"{file}: no such file; give a tokenizer.json, or a folder that has one")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # it raises nothing more special
        raise UsageError(f"{file} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def separator_of(tokenizer: Any, told: str | None) -> int:
    """Token that stands between documents.

    Raises:
        UsageError: it has none that is known, or not the one that was told.
    """
    for name in _KNOWN_SEPARATORS if told is None else (told,):
        if (token := tokenizer.token_to_id(name)) is not None:
            return int(token)
    if told is not None:
        raise UsageError(f"the tokenizer has no token {told!r} to stand between documents")
    raise UsageError(
        f"the tokenizer has none of {', '.join(_KNOWN_SEPARATORS)}: say with --separator which of its tokens is to "
        "stand between documents"
    )


def entries(tokenizer: Any) -> int:
    """The largest token and one."""
    return 1 + int(max(tokenizer.get_vocab(with_added_tokens=True).values()))


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of each text, on all cores; no separator is added."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of tokens."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
