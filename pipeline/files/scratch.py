"""Temporary folders that are cleared by the next writer if their own writer was killed.

A writer holds a lock on its folder, which the kernel releases however the process ends. So a dead writer is recognised
without comparing clocks, and without pids, which mean nothing across containers. On a file system without locks nothing
is cleared.
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
    """Create a folder in `directory` for the block to fill and rename; delete it if the block raises.

    Raises:
        OSError: the folder cannot be created.
    """
    folder, descriptor = locked(directory, PREFIX)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def move_into(folder: Path, out: Path, last: str) -> None:
    """Move a scratch folder's files into `out`, replacing those of equal names.

    last: name of the file without which the others are not valid: it comes last, and the one that it replaces goes
        first.

    Raises:
        OSError: a file cannot be moved.
    """
    out.mkdir(exist_ok=True)
    (out / last).unlink(missing_ok=True)
    for file in sorted(folder.iterdir(), key=lambda file: file.name == last):
        file.replace(out / file.name)
    folder.rmdir()


def locked(directory: Path, prefix: str) -> tuple[Path, int]:
    """Clear the folders of dead writers, and create one that only this user can read.

    It is locked until all copies of the returned descriptor are closed, those of other processes included.

    Raises:
        OSError: the folder cannot be created.
    """
    clear(directory, prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        with suppress(FileNotFoundError):  # another writer cleared it before it was locked: try again
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # no locks on this file system
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def clear(directory: Path, prefix: str) -> None:
    """Remove this user's folders with the prefix that nobody has locked."""
    for folder in directory.glob(f"{prefix}*"):
        with suppress(OSError):  # its writer is alive and holds the lock, or another process clears it too
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():  # root could remove the others' too
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
