"""A text as tokens, split into what is trained on and what is held out.

A token is a byte, or an entry of the vocabulary of whoever made the token file. Byte 0 stands between documents.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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

Tokens = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class TextData:
    """One text, split once and for all.

    train, validation: (tokens,) in 0..vocab-1, read-only; uint8 where tokens are bytes. fingerprint: xxh3-128 over
    both, in hex: learners of one run must have the same. files: or documents. skipped: those left out because they were
    empty, binary or not readable.
    """

    train: Tokens
    validation: Tokens
    fingerprint: str
    files: int
    skipped: int
    vocab: int = BYTES


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
        held_out = xxhash.xxh3_64_intdigest(name.encode()) % 10_000 < HELD_OUT * 10_000
        (validation if held_out else train).extend(text + b"\0")
    size = len(train) + len(validation)
    if size < MIN_BYTES:
        raise UsageError(
            f"data={data!r}: {size} bytes of text in {files} files ({skipped} empty, binary or unreadable ones were "
            f"skipped); at least {MIN_BYTES} are needed"
        )
    if not HELD_OUT / 4 <= len(validation) / size <= HELD_OUT * 4:
        return split(np.frombuffer(bytes(train + validation), np.uint8), files, skipped)
    return _text_data(np.frombuffer(bytes(train), np.uint8), np.frombuffer(bytes(validation), np.uint8), files, skipped)


def split(text: Tokens, files: int, skipped: int, vocab: int = BYTES) -> TextData:
    """The last part of it held out."""
    cut = len(text) - round(len(text) * HELD_OUT)
    return _text_data(text[:cut], text[cut:], files, skipped, vocab)


def _text_data(train: Tokens, validation: Tokens, files: int, skipped: int, vocab: int = BYTES) -> TextData:
    sums = b"".join(digest_of(as_bytes(part)) for part in (train, validation))
    return TextData(train, validation, xxhash.xxh3_128_hexdigest(sums), files, skipped, vocab)
