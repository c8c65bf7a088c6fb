"""Opens text that is not stored as text files: token files, memory-mapped; tables; and data sets by name.

tokens.npy                                     one array of unsigned integers, made by any tokenizer
text.parquet[,column=T]                        a table (or text.arrow), its text as bytes
hf:owner/name[,config=C][,split=S][,column=T]  a data set of the Hugging Face hub, its text as bytes
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data.text_sources import TABLES, documents, open_sources
from diloco.workers.trainer.data.tokens import MIN_BYTES, TextData, gather, split

# Tokens read at a time in the search for the largest one. It bounds the memory.
_PIECE = 2**24


def open_tokens(path: Path) -> TextData:
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


def is_table(data: str) -> bool:
    """Return whether `data` names a table's file, and not a folder with such a name."""
    return data.partition(",column=")[0].endswith(TABLES) and not Path(data).is_dir()


def open_documents(data: str) -> TextData:
    """Read a table, or a data set by name, into memory; a hash of a document's position decides if it is held out.

    Raises:
        UsageError: the extra `data` is missing; there is no such file, data set or column; or there is too little text.
    """
    name, _, column = data.partition(",column=") if is_table(data) else (data, "", "")
    texts = documents(open_sources([name], column or "text", streaming=False))
    return gather(((str(place), text.encode().replace(b"\0", b"")) for place, text in enumerate(texts)), data)
