"""Atomic replacement of files: a temporary file is written and synced, then renamed."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# Prefix of temporary files. One that remains is from a writer that was killed.
TEMPORARY = ".writing-"

Part = bytes | memoryview


def replace(path: Path, parts: Iterable[Part]) -> None:
    """Write a file atomically: a temporary file next to it is written and synced, then takes its place.

    Raises:
        OSError: the file cannot be written; the previous one is unchanged. The error names it.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a write failed, for example on a full disk
            error.filename = str(path)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # sync the folder too: otherwise a crash may undo the rename
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_named(path: Path, text: str) -> None:
    """Write a file that a user has named, as `replace` does: through links, and directly to a device or pipe.

    Raises:
        OSError: it cannot be written; a previous file is unchanged. The error names it.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8")
    else:
        replace(Path(os.path.realpath(path)), [text.encode()])


def digested(parts: Iterable[Part], update: Callable[[Part], None]) -> Iterator[Part]:
    """Yield the same parts, and pass each to a digest."""
    for part in parts:
        update(part)
        yield part
