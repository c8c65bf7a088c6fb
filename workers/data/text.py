"""Text sources: a file, a folder, or the source text of Python's own standard library, as bytes.

A token is a byte. Byte 0 stands between documents, so files that contain it (binary ones) are skipped. Token files and
data sets by name are in `other`.
"""

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.codec import as_bytes, digest_of
from pipeline.errors import UsageError

BOUNDARY = 0
"""Token between documents."""

HELD_OUT = 0.04
"""Share of the text kept for validation."""

BYTES = 256
"""Vocabulary of a text whose tokens are bytes."""

MIN_BYTES = 4096
_PROBE_BYTES = 8192

_STDLIB_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


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


def open_text(data: str) -> TextData:
    """Open `data`: "stdlib", a text file, or a folder of text files (recursive, hidden ones left out); or as `other`.

    Held-out files are chosen by a hash of their relative path, so that all learners choose the same ones; where
    that gives too much or too little (few files), and for a single file, the last part of the text is held out.

    Raises:
        UsageError: nothing there, nothing readable as text, or less than 4 KiB of it.
    """
    if data == "stdlib":
        return _open_stdlib()
    path = Path(data)
    if data.startswith("hf:") or path.suffix == ".npy":
        from . import other

        return other.open_hub(data) if data.startswith("hf:") else other.open_tokens(path)
    if path.is_file():
        if path.stat().st_size < MIN_BYTES:
            raise UsageError(f"data={data!r}: {path.stat().st_size} bytes are too few; at least {MIN_BYTES} are needed")
        text = np.memmap(path, np.uint8, mode="r")
        if BOUNDARY in text[:_PROBE_BYTES]:
            raise UsageError(f"data={data!r} is a binary file; give a text file, a folder of them, or 'stdlib'")
        return split(text, files=1, skipped=0)
    if path.is_dir():
        visible = (p for p in sorted(path.rglob("*")) if p.is_file() and not any(n[0] == "." for n in _parts(p, path)))
        return _from_files(path, visible, data)
    raise UsageError(f"data={data!r}: no such file or folder; give a text file, a folder of them, or 'stdlib'")


@cache
def _open_stdlib() -> TextData:
    """Its files do not change while a process lives; a process forked from one that has read them need not."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if not _STDLIB_SKIPPED & _parts(path, root)]
    return _from_files(root, paths, "stdlib")


def _parts(path: Path, root: Path) -> set[str]:
    return set(path.relative_to(root).parts)


def _read(path: Path) -> bytes:
    """A file's bytes; none at all if it is binary or not readable."""
    try:
        with path.open("rb") as file:
            head = file.read(_PROBE_BYTES)
            if BOUNDARY in head:
                return b""
            return (head + file.read()).replace(b"\0", b"")
    except OSError:
        return b""


def _from_files(root: Path, paths: Iterator[Path] | list[Path], data: str) -> TextData:
    return gather(((path.relative_to(root).as_posix(), _read(path)) for path in paths), data)


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
