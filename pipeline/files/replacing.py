"""Files that are whole or not there: written beside, synced, then renamed."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

TEMPORARY = ".writing-"
"""How the name of a file begins that is not whole yet: one that is left is of a writer that was killed."""

Part = bytes | memoryview


def replace(path: Path, parts: Iterable[Part]) -> None:
    """Write a file whole or not at all: a temporary one beside it, synced, takes its place.

    Raises:
        OSError: what was there is there still.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def digested(parts: Iterable[Part], update: Callable[[Part], None]) -> Iterator[Part]:
    """The same parts, each given to a digest as it goes by."""
    for part in parts:
        update(part)
        yield part
