"""Text sources: a file, a folder, or the source text of Python's own standard library, as bytes.

Byte 0 stands between documents, so files that contain it (binary ones) are skipped. Token files, tables and data sets
by name are in `other`, token shards in `shards`.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data import other, shards
from diloco.workers.trainer.data.files import PROBE_BYTES, stdlib_files, stdlib_root, visible_files
from diloco.workers.trainer.data.sources import DATA_SET, TABLES
from diloco.workers.trainer.data.tokens import BOUNDARY, MIN_BYTES, TextData, gather, split

TOKENS = ".npy"


def has_tokens(data: str) -> bool:
    """Whether it is tokens already, and no text: a token file, or a folder of token shards."""
    return Path(data).suffix == TOKENS or shards.is_shards(Path(data))


def open_text(data: str) -> TextData:
    """Open `data`: "stdlib", a text file, or a folder of text files (recursive, hidden ones left out); or as `other`.

    A folder of token shards is opened as such.

    Held-out files are chosen by a hash of their relative path, so that all learners choose the same ones; where
    that gives too much or too little (few files), and for a single file, the last part of the text is held out.

    Raises:
        UsageError: nothing there, nothing readable as text, or less than 4 KiB of it.
    """
    if data == "stdlib":
        return _open_stdlib()
    path = Path(data)
    if data.startswith(DATA_SET) or other.is_table(data):
        return other.open_documents(data)
    if path.suffix == TOKENS:
        return other.open_tokens(path)
    if path.is_file():
        if path.stat().st_size < MIN_BYTES:
            raise UsageError(f"data={data!r}: {path.stat().st_size} bytes are too few; at least {MIN_BYTES} are needed")
        text = np.memmap(path, np.uint8, mode="r")
        if BOUNDARY in text[:PROBE_BYTES]:
            raise UsageError(f"data={data!r} is a binary file; give a text file, a folder of them, or 'stdlib'")
        return split(text, files=1, skipped=0)
    if shards.is_shards(path):
        return shards.open_shards(path)
    if path.is_dir():
        files = visible_files(path)
        try:
            return _from_files(path, files, data)
        except UsageError as error:
            if any(file.suffix in TABLES for file in files):
                prepare = f"diloco data prepare {data} --out FOLDER"
                raise UsageError(f"{error}. Its tables become token shards by `{prepare}`") from error
            raise
    raise UsageError(f"data={data!r}: no such file or folder; give a text file, a folder of them, or 'stdlib'")


@cache
def _open_stdlib() -> TextData:
    """Its files do not change while a process lives; a process forked from one that has read them need not."""
    return _from_files(stdlib_root(), stdlib_files(), "stdlib")


def _read(path: Path) -> bytes:
    """A file's bytes; none at all if it is binary or not readable."""
    try:
        with path.open("rb") as file:
            head = file.read(PROBE_BYTES)
            if BOUNDARY in head:
                return b""
            return (head + file.read()).replace(b"\0", b"")
    except OSError:
        return b""


def _from_files(root: Path, paths: Iterable[Path], data: str) -> TextData:
    return gather(((path.relative_to(root).as_posix(), _read(path)) for path in paths), data)
