"""A text as tokens, split into a part to train on and a part that is held out.

A token is a byte, or an entry of the vocabulary by which a token file was made. Byte 0 stands between documents.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from diloco.pipeline.errors import UsageError
from diloco.pipeline.payload.codec import as_bytes, digest_of

# Token between documents.
BOUNDARY = 0

# Share of the text kept for validation.
HELD_OUT = 0.04

# Size of the vocabulary of a text whose tokens are bytes.
BYTES = 256

MIN_BYTES = 4096

_ROUND = 64

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class TokenText(Protocol):
    """A sequence of tokens in memory or in files: an array (tokens,), or something that can be sliced like one."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        ...

    def __getitem__(self, part: slice, /) -> Tokens:
        """Return the tokens of a slice."""
        ...


@dataclass(frozen=True, slots=True)
class TextData:
    """One text, split once and for all.

    train, validation: (tokens,) in 0..entries-1, read-only; uint8 if tokens are bytes. fingerprint: xxh3-128 in hex
    over both, or over the index of token shards; learners of one run must have the same. files: number of files or
    documents. skipped: number of those left out because they were empty, binary or not readable.
    """

    train: TokenText
    validation: TokenText
    fingerprint: str
    files: int
    skipped: int
    entries: int = BYTES
    tokenizer: str | None = None
    """Digest of the tokenizer that read the text when it was opened."""
    made_by: tuple[str, ...] | None = None
    """Digests of the tokenizer's file if the text was tokens already, empty if they are not known; otherwise None."""

    @property
    def vocab(self) -> int:
        """Size of a built-in model's vocabulary: 256 if a token takes one byte, else `entries` rounded up to 64s."""
        return BYTES if self.train[:0].dtype == np.uint8 else rounded_vocab(self.entries)


def rounded_vocab(entries: int) -> int:
    """Return the size of a model's vocabulary: `entries` rounded up to a multiple of 64."""
    return -(-entries // _ROUND) * _ROUND


def is_held_out(name: str) -> bool:
    """Return whether a document is kept for validation: by its name, so that all parties choose the same ones."""
    return xxhash.xxh3_64_intdigest(name.encode()) % 10_000 < HELD_OUT * 10_000


def balanced(held_out: int, size: int) -> bool:
    """Return whether about as much was held out as is wanted; with few documents it may be nothing or most of them."""
    return HELD_OUT / 4 <= held_out / size <= HELD_OUT * 4


def gather(documents: Iterable[tuple[str, bytes]], data: str) -> TextData:
    """Join documents, each with the name whose hash decides if it is held out; empty ones are left out.

    Raises:
        UsageError: there is too little text.
    """
    train, validation, skipped = bytearray(), bytearray(), 0
    files = 0
    for name, text in documents:
        if not text:
            skipped += 1
            continue
        files += 1
        (validation if is_held_out(name) else train).extend(text + b"\0")
    size = len(train) + len(validation)
    if size < MIN_BYTES:
        raise UsageError(
            f"data={data!r}: {size} bytes of text in {files} files ({skipped} empty, binary or unreadable files were "
            f"skipped) are too few; give at least {MIN_BYTES}"
        )
    if not balanced(len(validation), size):
        return split(np.frombuffer(bytes(train + validation), np.uint8), files, skipped)
    return _text_data(np.frombuffer(bytes(train), np.uint8), np.frombuffer(bytes(validation), np.uint8), files, skipped)


def split(text: Tokens, files: int, skipped: int) -> TextData:
    """Hold out the last part of a text."""
    cut = len(text) - round(len(text) * HELD_OUT)
    return _text_data(text[:cut], text[cut:], files, skipped)


def _text_data(train: Tokens, validation: Tokens, files: int, skipped: int) -> TextData:
    sums = b"".join(digest_of(as_bytes(part)) for part in (train, validation))
    return TextData(train, validation, xxhash.xxh3_128_hexdigest(sums), files, skipped)
