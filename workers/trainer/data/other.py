"""Text that does not lie here as text: token files, memory-mapped, and data sets by name.

tokens.npy                                     one array of unsigned integers, made by any tokenizer
hf:owner/name[,config=C][,split=S][,column=T]  a data set of the Hugging Face hub, its text as bytes
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data.tokens import BYTES, MIN_BYTES, TextData, gather, split

_ROUND = 64
"""A vocabulary is rounded up to this."""
_PIECE = 2**24
"""Tokens looked at in one go."""
_KNOWN = ("config", "split", "column")


def open_tokens(path: Path) -> TextData:
    """A `.npy` file (tokens,) of uint8, uint16 or uint32, memory-mapped; its last part is held out.

    The vocabulary is as large as its largest token asks for, rounded up; bytes have their own.

    Raises:
        UsageError: not such a file, or too short.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"data={str(path)!r} is not a token file: {error}") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype not in (np.uint8, np.uint16, np.uint32):
        kind = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else "no array"
        raise UsageError(f"data={str(path)!r} is {kind}: give one flat array of uint8, uint16 or uint32")
    if len(tokens) < MIN_BYTES:
        raise UsageError(f"data={str(path)!r}: {len(tokens)} tokens are too few; at least {MIN_BYTES} are needed")
    largest = max(int(tokens[start : start + _PIECE].max()) for start in range(0, len(tokens), _PIECE))
    vocab = BYTES if tokens.dtype == np.uint8 else (largest // _ROUND + 1) * _ROUND
    return split(tokens, files=1, skipped=0, vocab=vocab)


def open_hub(data: str) -> TextData:
    """A data set by name; documents are held out by a hash of their place in it. All of its text goes to memory.

    Raises:
        UsageError: the extra `hub` is missing, no such data set or column, or too little text.
    """
    name, *more = data.removeprefix("hf:").split(",")
    told = dict(part.partition("=")[::2] for part in more)
    if wrong := [key for key in told if key not in _KNOWN]:
        raise UsageError(f"data={data!r}: unknown {wrong[0]!r}; known are {', '.join(_KNOWN)}")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UsageError(
            f"data={data!r} needs `datasets`, which is not installed: pip install 'diloco[hub]'"
        ) from error
    try:
        table = datasets.load_dataset(name, told.get("config"), split=told.get("split", "train"))
    except Exception as error:  # of a library with many of its own
        raise UsageError(f"data={data!r} cannot be loaded: {error}") from error
    column = told.get("column", "text")
    if column not in table.column_names:
        raise UsageError(f"data={data!r} has no column {column!r}; it has {', '.join(table.column_names)}")
    return gather(_documents(table, column), data)


def _documents(table: Any, column: str) -> Iterator[tuple[str, bytes]]:
    for place, row in enumerate(table.select_columns([column])):
        yield str(place), str(row[column]).encode().replace(b"\0", b"")
