"""Folders in the making, of which those of killed writers go when the next writer begins.

A writer holds a lock on its folder, which ends with the process, however it ends: so nobody's clock, and no pid of
another container, is needed to tell the dead from the living. Where the file system has no locks nothing is cleared.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".writing-"


@contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """A new folder in `directory`, for the block to fill and rename; it goes if the block raises.

    Raises:
        OSError: it cannot be made.
    """
    _clear(directory)
    folder, descriptor = _locked(directory)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def _locked(directory: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
        with suppress(FileNotFoundError):  # another writer took it for a dead one's before it was locked
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # no locks here
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _clear(directory: Path) -> None:
    for folder in directory.glob(f"{PREFIX}*"):
        with suppress(OSError):  # its writer lives, or another one clears it too
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
