"""Text sources: a file, a folder, or the source text of Python's own standard library, as bytes.

Byte 0 stands between documents, so files that contain it (binary ones) are skipped. Token files and data sets by name
are in `other`.
"""

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data import other
from diloco.workers.trainer.data.tokens import BOUNDARY, MIN_BYTES, TextData, gather, split

_PROBE_BYTES = 8192

_STDLIB_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


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
