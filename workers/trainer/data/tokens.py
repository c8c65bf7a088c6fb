"""A text as tokens, split into what is trained on and what is held out.

A token is a byte, or an entry of the vocabulary of whoever made the token file. Byte 0 stands between documents.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from diloco.pipeline.errors import UsageError
from diloco.pipeline.payload.codec import as_bytes, digest_of

BOUNDARY = 0
"""Token between documents."""

HELD_OUT = 0.04
"""Share of the text kept for validation."""

BYTES = 256
"""Vocabulary of a text whose tokens are bytes."""

MIN_BYTES = 4096

_ROUND = 64

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class TokenText(Protocol):
    """Tokens one after the other, in memory or in files: an array (tokens,), or what slices as one does."""

    def __len__(self) -> int:
        """Number of tokens."""
        ...

    def __getitem__(self, part: slice, /) -> Tokens:
        """Those of a slice."""
        ...


@dataclass(frozen=True, slots=True)
class TextData:
    """One text, split once and for all.

    train, validation: (tokens,) in 0..entries-1, read-only; uint8 where tokens are bytes. fingerprint: xxh3-128 over
    both, in hex, of token shards over their index: learners of one run must have the same. files: or documents.
    skipped: those left out because they were empty, binary or not readable.
    """

    train: TokenText
    validation: TokenText
    fingerprint: str
    files: int
    skipped: int
    entries: int = BYTES
    tokenizer: str | None = None
    """Digest of the tokenizer that read it on opening."""
    made_by: tuple[str, ...] | None = None
    """Of tokens that were made before: digests of their tokenizer's file, none where it is not known. None: of text."""

    @property
    def vocab(self) -> int:
        """Of a built-in model: a multiple of 64, that of bytes where tokens take one."""
        return BYTES if self.train[:0].dtype == np.uint8 else rounded_vocab(self.entries)


def rounded_vocab(entries: int) -> int:
    """A model's vocabulary: a multiple of 64."""
    return -(-entries // _ROUND) * _ROUND


def is_held_out(name: str) -> bool:
    """Whether a document is kept for validation: by its name, so that everybody chooses the same ones."""
    return xxhash.xxh3_64_intdigest(name.encode()) % 10_000 < HELD_OUT * 10_000


def balanced(held_out: int, size: int) -> bool:
    """Whether about as much was held out as is wanted; of few documents it may be none or most."""
    return HELD_OUT / 4 <= held_out / size <= HELD_OUT * 4


def gather(documents: Iterable[tuple[str, bytes]], data: str) -> TextData:
    """Documents, each with the name whose hash says whether it is held out; empty ones are left out.

    Raises:
        UsageError: too little text.
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
            f"data={data!r}: {size} bytes of text in {files} files ({skipped} empty, binary or unreadable ones were "
            f"skipped); at least {MIN_BYTES} are needed"
        )
    if not balanced(len(validation), size):
        return split(np.frombuffer(bytes(train + validation), np.uint8), files, skipped)
    return _text_data(np.frombuffer(bytes(train), np.uint8), np.frombuffer(bytes(validation), np.uint8), files, skipped)


def split(text: Tokens, files: int, skipped: int) -> TextData:
    """The last part of it held out."""
    cut = len(text) - round(len(text) * HELD_OUT)
    return _text_data(text[:cut], text[cut:], files, skipped)


def _text_data(train: Tokens, validation: Tokens, files: int, skipped: int) -> TextData:
    sums = b"".join(digest_of(as_bytes(part)) for part in (train, validation))
    return TextData(train, validation, xxhash.xxh3_128_hexdigest(sums), files, skipped)
