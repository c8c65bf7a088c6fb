"""Where text to be tokenised comes from: files, folders, globs, tables (parquet, arrow), data sets by name.

A source is a list of parts, each of which can be read independently. Their order depends only on names, so that the
same files give the same tokens in any place. Only what is being read is held in memory.
"""

import glob
import importlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from diloco.pipeline.errors import UsageError
from diloco.workers.permutation import permuted
from diloco.workers.trainer.optional import library

# Bytes at a file's start that are read to detect a binary file.
PROBE_BYTES = 8192
# A longer text counts as several documents of about this size.
PIECE_BYTES = 128 * 1024
# Bytes in which to look for a good place to cut; less than a piece.
_LOOK_BYTES = 64 * 1024
# Number of a text file's pieces in one part.
_PIECES = 32
# Rows of a data set by name in one part, and rows of a table in one batch.
_ROWS = 1000
TABLES = (".parquet", ".arrow")
# Prefix of a data set's name. The prefix of a model is the same: `hf_config.MODEL`.
DATA_SET = "hf:"
_KNOWN = ("config", "split", "column")
_STDLIB_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


# Reads one part: yields its documents in order.
Part = Callable[[], Iterator[str]]


class Source(NamedTuple):
    """All text to be tokenised."""

    parts: Sequence[Part]
    counted: bool
    """True if the number of parts shows how far reading is; a stream is a single part of any length."""
    skipped: int
    """Number of files that are empty, binary or not readable."""


def open_sources(texts: Iterable[str], column: str, streaming: bool) -> Source:
    """Open text files, folders of them or of tables, tables, globs, "stdlib", and data sets as hf:OWNER/NAME.

    Args:
        texts: the names.
        column: the column of tables, and of data sets whose name gives none.
        streaming: read data sets as they arrive, without a copy on this disk.

    Raises:
        UsageError: something is not there, has no such column or is not text; or a package is missing.
    """
    found = [_open(text, column, streaming) for text in texts]
    parts = [part for source in found for part in source.parts]
    return Source(parts, all(source.counted for source in found), sum(source.skipped for source in found))


def documents(source: Source, told: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Yield all documents in order; call `told` after each part."""
    for part in source.parts:
        yield from part()
        told()


def sample(source: Source, max_bytes: int) -> Iterator[str]:
    """Yield roughly up to `max_bytes` of text: the starts of parts spread over the source, the same every time."""
    count, left = len(source.parts), max_bytes
    share = max(max_bytes // max(1, count), PIECE_BYTES)
    for number in range(count):
        rest = min(share, left)
        for text in source.parts[permuted(number, count, b"sample")]():
            yield text
            size = len(text.encode())
            rest, left = rest - size, left - size
            if rest <= 0:
                break
        if left <= 0:
            return


def _open(text: str, column: str, streaming: bool) -> Source:
    if text.startswith(DATA_SET):
        return _open_hub(text, column, streaming)
    if text == "stdlib":
        return _of_files(stdlib_files(), column)
    path = Path(text)
    if path.is_dir():
        files = visible_files(path)
        tables = [file for file in files if file.suffix in TABLES]
        source = _of_files(tables or files, column)  # files next to tables describe them: not text
    elif path.is_file():
        source = _of_files([path], column)
    else:
        matching = [Path(name) for name in sorted(glob.glob(text, recursive=True))]  # noqa: PTH207  # it may be absolute
        source = _of_files([found for found in matching if found.is_file()], column)
        if not matching:
            raise UsageError(f"{text!r}: no such file or folder, and nothing matches it")
    if not source.parts:
        raise UsageError(f"{text!r} has no readable text: {source.skipped} files are empty, binary or unreadable")
    return source


def _of_files(files: Iterable[Path], column: str) -> Source:
    parts: list[Part] = []
    skipped = 0
    for file in files:
        made = _table_parts(file, column) if file.suffix in TABLES else _text_parts(file)
        skipped += not made
        parts += made
    return Source(parts, counted=True, skipped=skipped)


# --- text files ----------------------------------------------------------------------------------------------


def visible_files(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted by path, except hidden ones and those in hidden folders."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(name[0] == "." for name in path.relative_to(folder).parts)
    ]


def stdlib_root() -> Path:
    """Return the folder of Python's own source text."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[Path]:
    """Return the files of Python's own source text, without its test suites."""
    found: list[Path] = []
    for folder, below, names in os.walk(stdlib_root()):
        below[:] = set(below) - _STDLIB_SKIPPED  # site-packages may hold very many files
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _text_parts(path: Path) -> list[Part]:
    try:
        with path.open("rb") as file:
            if b"\0" in file.read(PROBE_BYTES):
                return []
        count = -(-path.stat().st_size // PIECE_BYTES)
    except OSError:
        return []
    return [partial(_pieces, path, first, min(first + _PIECES, count)) for first in range(0, count, _PIECES)]


def _pieces(path: Path, first: int, stop: int) -> Iterator[str]:
    """Yield pieces first..stop-1 of a file; each is found without reading those before it."""
    with path.open("rb") as file:
        for number in range(first, stop):
            file.seek(number * PIECE_BYTES)
            data = file.read(PIECE_BYTES + _LOOK_BYTES)
            piece = data[_cut(data, 0) if number else 0 : _cut(data, PIECE_BYTES)]
            if piece:
                yield piece.decode(errors="replace")


def _cut(data: bytes, at: int) -> int:
    """Return where to cut at `at` or a little later: after a line end, else before a blank, else between characters."""
    stop = at + _LOOK_BYTES
    if (line := data.find(b"\n", at, stop)) >= 0:
        return line + 1
    if (blank := data.find(b" ", at, stop)) >= 0:
        return blank
    stop = min(stop, len(data))
    while at < stop and data[at] & 0xC0 == 0x80:
        at += 1
    return min(at, len(data))


def shortened(text: str) -> Iterator[str]:
    """Yield a text, cut into pieces in the same way as a file."""
    if len(text) * 4 <= PIECE_BYTES or len(data := text.encode()) <= PIECE_BYTES + _LOOK_BYTES:
        yield text
        return
    starts = [0, *(at + _cut(data[at : at + _LOOK_BYTES], 0) for at in range(PIECE_BYTES, len(data), PIECE_BYTES))]
    for start, stop in zip(starts, [*starts[1:], len(data)], strict=True):
        if start < stop:
            yield data[start:stop].decode(errors="replace")


# --- tables --------------------------------------------------------------------------------------------------


def _table_parts(path: Path, column: str) -> list[Part]:
    """Return the parts of a table: a parquet file's row groups, or a whole arrow file (as `datasets` stores it).

    Raises:
        UsageError: it is not such a file, or has no such column of text.
    """
    if path.suffix == ".parquet":
        parquet = library("pyarrow.parquet", "data", str(path))
        with _opened(path, parquet.ParquetFile, "parquet") as file:
            _check_column(path, file.schema_arrow, column)
            groups = file.num_row_groups
        return [partial(_parquet_rows, path, column, group) for group in range(groups)]
    library("pyarrow.ipc", "data", str(path))
    with _opened_arrow(path) as reader:
        _check_column(path, reader.schema, column)
    return [partial(_arrow_rows, path, column)]


def _opened(path: Path, opener: Callable[..., Any], kind: str, **more: Any) -> Any:
    try:
        return opener(path, **more)
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise UsageError(f"{path} cannot be read as {kind}: {' '.join(str(error).split())}") from error


def _opened_arrow(path: Path, column: int | None = None) -> Any:
    """Open an arrow file, in the stream format (as `datasets` writes it) or the file format.

    column: number of the only column to read; None reads all.
    """
    arrow, ipc = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.ipc")
    options = ipc.IpcReadOptions(included_fields=None if column is None else [column])
    try:
        return ipc.open_file(arrow.OSFile(str(path)), options=options)
    except (OSError, ValueError):
        return _opened(path, lambda path: ipc.open_stream(arrow.OSFile(str(path)), options=options), "arrow")


def _check_column(path: Path, schema: Any, column: str) -> None:
    types = importlib.import_module("pyarrow").types
    kinds = (types.is_string, types.is_large_string, types.is_string_view)
    held = [(f.name, f.type.value_type if types.is_dictionary(f.type) else f.type) for f in schema]
    texts = [name for name, type_ in held if any(kind(type_) for kind in kinds)]
    if column not in texts:
        has = f"its text columns are {', '.join(texts)}" if texts else "it has no text columns"
        raise UsageError(f"{path} has no text column {column!r}; {has}")


def _parquet_rows(path: Path, column: str, group: int) -> Iterator[str]:
    parquet = importlib.import_module("pyarrow.parquet")
    more = {"buffer_size": 2**20, "pre_buffer": False}  # otherwise a whole row group is read into memory
    with _opened(path, parquet.ParquetFile, "parquet", **more) as file:
        batches = file.iter_batches(_ROWS, row_groups=[group], columns=[column], use_threads=False)
        yield from _rows(path, batches)


def _arrow_rows(path: Path, column: str) -> Iterator[str]:
    with _opened_arrow(path) as reader:
        number = reader.schema.get_field_index(column)
    with _opened_arrow(path, number) as reader:
        whole = hasattr(reader, "num_record_batches")
        yield from _rows(path, map(reader.get_batch, range(reader.num_record_batches)) if whole else iter(reader))


def _rows(path: Path, batches: Iterator[Any]) -> Iterator[str]:
    """Yield the texts of batches with one column; a missing value is an empty text."""
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                for text in batch.column(0).slice(start, _ROWS).to_pylist():
                    yield from shortened(text or "")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {' '.join(str(error).split())}") from error


# --- data sets by name ---------------------------------------------------------------------------------------


def _open_hub(data: str, usual: str, streaming: bool) -> Source:
    """Open a data set hf:OWNER/NAME[,config=C][,split=S][,column=T]. `usual` is the default column."""
    name, *more = data.removeprefix(DATA_SET).split(",")
    told = dict(part.partition("=")[::2] for part in more)
    if wrong := [key for key in told if key not in _KNOWN]:
        raise UsageError(f"data={data!r}: unknown {wrong[0]!r}; known are {', '.join(_KNOWN)}")
    datasets = library("datasets", "data", f"data={data!r}")
    try:
        way = {"streaming": True} if streaming else {}
        table = datasets.load_dataset(name, told.get("config"), split=told.get("split", "train"), **way)
    except Exception as error:  # the library raises many kinds of its own
        raise UsageError(f"data={data!r} cannot be loaded: {error}") from error
    column = told.get("column", usual)
    names = table.column_names or list(next(iter(table), {}))  # a stream may not know them before its first row
    if column not in names:
        raise UsageError(f"data={data!r} has no column {column!r}; it has {', '.join(names)}")
    table = table.select_columns([column])
    if streaming:
        return Source([lambda: _hub_rows(data, iter(table), column)], counted=False, skipped=0)
    starts = range(0, len(table), _ROWS)
    parts = [partial(_hub_range, table, column, start, min(start + _ROWS, len(table))) for start in starts]
    return Source(parts, counted=True, skipped=0)


def _hub_range(table: Any, column: str, start: int, stop: int) -> Iterator[str]:
    texts = table[start:stop][column]
    return chain.from_iterable(shortened(str(text or "")) for text in texts)


def _hub_rows(data: str, rows: Iterator[Any], column: str) -> Iterator[str]:
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # network errors, and many kinds of the library's own
            raise UsageError(f"data={data!r} could not be read to the end: {error}") from error
        if row is None:
            return
        yield from shortened(str(row[column] or ""))
