"""Opens text: a file, a folder, or the source text of Python's own standard library, as bytes.

Byte 0 stands between documents, so files that contain it (binary ones) are skipped. `other` opens token files, tables
and data sets by name; `shards` opens token shards.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data import other, token_shards
from diloco.workers.trainer.data.text_files import PROBE_BYTES, stdlib_files, stdlib_root, visible_files
from diloco.workers.trainer.data.text_sources import DATA_SET, TABLES
from diloco.workers.trainer.data.tokens import BOUNDARY, MIN_BYTES, TextData, gather, split

TOKENS = ".npy"


def has_tokens(data: str) -> bool:
    """Return whether `data` is tokens already rather than text: a token file, or a folder of token shards."""
    return Path(data).suffix == TOKENS or token_shards.is_shards(Path(data))


def open_text(data: str) -> TextData:
    """Open `data`: "stdlib", a text file, a folder of text files, a folder of token shards, or what `other` opens.

    A folder of text files is read recursively, without hidden files. A hash of a file's relative path decides if it is
    held out, so that all learners choose the same ones. Where that gives too much or too little (few files), and for a
    single file, the last part of the text is held out.

    Raises:
        UsageError: there is nothing, or nothing readable as text, or less than 4 KiB of it.
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
            raise UsageError(f"data={data!r}: {path.stat().st_size} bytes are too few; give at least {MIN_BYTES}")
        text = np.memmap(path, np.uint8, mode="r")
        if BOUNDARY in text[:PROBE_BYTES]:
            raise UsageError(f"data={data!r} is a binary file; give a text file, a folder of them, or 'stdlib'")
        return split(text, files=1, skipped=0)
    if token_shards.is_shards(path):
        return token_shards.open_shards(path)
    if path.is_dir():
        files = visible_files(path)
        try:
            return _from_files(path, files, data)
        except UsageError as error:
            if any(file.suffix in TABLES for file in files):
                prepare = f"diloco data prepare {data} --out FOLDER"
                raise UsageError(f"{error}. To turn its tables into token shards, run `{prepare}`") from error
            raise
    raise UsageError(f"data={data!r}: no such file or folder; give a text file, a folder of them, or 'stdlib'")


@cache
def _open_stdlib() -> TextData:
    """Open the standard library's source text, once per process: its files do not change while a process lives.

    A process forked from one that has read them need not read them again.
    """
    return _from_files(stdlib_root(), stdlib_files(), "stdlib")


def _read(path: Path) -> bytes:
    """Return a file's bytes; none if it is binary or not readable."""
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
