"""Trace files: lines of numbers. Empty lines, and what follows a '#', do not count."""

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import UsageError

Floats = npt.NDArray[np.float64]


def read_trace(path: Path, columns: int) -> Floats:
    """All lines of a file, (lines, columns).

    Raises:
        UsageError: naming the file, and the line that is not so many finite numbers of 0 or more.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            row = [float(word) for word in words]
        except ValueError:
            row = []
        if len(row) != columns or not all(math.isfinite(value) and value >= 0 for value in row):
            raise UsageError(
                f"{path}, line {number}: expected {columns} numbers of 0 or more, not {line.strip()[:40]!r}"
            )
        rows.append(row)
    if not rows:
        raise UsageError(f"{path}: the file is empty")
    return np.array(rows)
