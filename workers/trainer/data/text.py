"""Opens text: a file, a folder, or the source text of Python's own standard library, as bytes; and what is not stored
as text files:

tokens.npy                                     one array of unsigned integers, made by any tokenizer
text.parquet[,column=T]                        a table (or text.arrow), its text as bytes
hf:owner/name[,config=C][,split=S][,column=T]  a data set of the Hugging Face hub, its text as bytes

Byte 0 stands between documents, so files that contain it (binary ones) are skipped. `token_shards` opens token shards.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data import token_shards
from diloco.workers.trainer.data.text_sources import (
    DATA_SET,
    PROBE_BYTES,
    TABLES,
    documents,
    open_sources,
    stdlib_files,
    stdlib_root,
    visible_files,
)
from diloco.workers.trainer.data.tokens import BOUNDARY, MIN_BYTES, TextData, gather, split

TOKENS = ".npy"
_GIVE = "give a text file, a folder of them, or 'stdlib'"
# Tokens read at a time in the search for the largest one. It bounds the memory.
_PIECE = 2**24


def has_tokens(data: str) -> bool:
    """Return whether `data` is tokens already rather than text: a token file, or a folder of token shards."""
    return Path(data).suffix == TOKENS or token_shards.is_shards(Path(data))


def open_text(data: str) -> TextData:
    """Open `data`: "stdlib", a text file, a folder of text files or token shards, a token file, a table or a data set.

    A folder of text files is read recursively, without hidden files. A hash of a file's relative path decides if it is
    held out, so that all learners choose the same ones. Where that gives too much or too little (few files), and for a
    single file, the last part of the text is held out.

    Raises:
        UsageError: there is nothing, or nothing readable as text, or less than 4 KiB of it.
    """
    if data == "stdlib":
        return _open_stdlib()
    path = Path(data)
    if data.startswith(DATA_SET) or _is_table(data):
        return _open_documents(data)
    if path.suffix == TOKENS:
        return _open_tokens(path)
    if path.is_file():
        _check_file(path)
        return split(np.memmap(path, np.uint8, mode="r"), files=1, skipped=0)
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
    raise UsageError(f"data={data!r}: no such file or folder; {_GIVE}")


def check_start(path: Path) -> None:
    """Check what is quickly seen of texts and token files: that there are files, their size, and how a file starts.

    `open_text` checks more and takes longer.

    Raises:
        UsageError: there is nothing to train on.
    """
    if path.is_file():
        if path.suffix not in TABLES:
            _check_file(path)
    elif path.is_dir():
        if token_shards.is_shards(path):
            return
        files = visible_files(path)
        if not any(file.suffix in TABLES for file in files):
            _check_size(path, sum(file.stat().st_size for file in files))
    elif path.exists():
        raise UsageError(f"data={str(path)!r} is neither a file nor a folder; {_GIVE}")


def _check_file(path: Path) -> None:
    _check_size(path, path.stat().st_size)
    if path.suffix != TOKENS:
        with path.open("rb") as file:
            if bytes([BOUNDARY]) in file.read(PROBE_BYTES):
                raise UsageError(f"data={str(path)!r} is a binary file; {_GIVE}")


def _check_size(path: Path, size: int) -> None:
    if size < MIN_BYTES:
        raise UsageError(f"data={str(path)!r}: {size} bytes are too few; give at least {MIN_BYTES}")


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


def _open_tokens(path: Path) -> TextData:
    """Memory-map a `.npy` file (tokens,) of uint8, uint16 or uint32; its last part is held out.

    The vocabulary has as many entries as the largest token requires.

    Raises:
        UsageError: it is not such a file, or too short.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"data={str(path)!r} is not a token file: {error}") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype not in (np.uint8, np.uint16, np.uint32):
        kind = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else "no array"
        raise UsageError(f"data={str(path)!r} is {kind}; give one flat array of uint8, uint16 or uint32")
    if len(tokens) < MIN_BYTES:
        raise UsageError(f"data={str(path)!r}: {len(tokens)} tokens are too few; give at least {MIN_BYTES}")
    largest = max(int(tokens[start : start + _PIECE].max()) for start in range(0, len(tokens), _PIECE))
    return replace(split(tokens, files=1, skipped=0), entries=largest + 1, made_by=())


def _is_table(data: str) -> bool:
    """Return whether `data` names a table's file, and not a folder with such a name."""
    return data.partition(",column=")[0].endswith(TABLES) and not Path(data).is_dir()


def _open_documents(data: str) -> TextData:
    """Read a table, or a data set by name, into memory; a hash of a document's position decides if it is held out.

    Raises:
        UsageError: the extra `data` is missing; there is no such file, data set or column; or there is too little text.
    """
    name, _, column = data.partition(",column=") if _is_table(data) else (data, "", "")
    texts = documents(open_sources([name], column or "text", streaming=False))
    return gather(((str(place), text.encode().replace(b"\0", b"")) for place, text in enumerate(texts)), data)
