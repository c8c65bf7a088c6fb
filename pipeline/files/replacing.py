"""Atomic replacement of files: a temporary file is written and synced, then renamed."""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

# Prefix of temporary files. One that remains is from a writer that was killed.
TEMPORARY = ".writing-"
# Errors of a file that can be written although it cannot be replaced: another user's folder, a file that is a mount.
_IN_PLACE = {errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV, errno.EROFS}

Part = bytes | memoryview


def replace(path: Path, parts: Iterable[Part]) -> None:
    """Write a file atomically: a temporary file next to it is written and synced, then takes its place, with its mode.

    Raises:
        OSError: the file cannot be written; the previous one is unchanged. The error names it.
    """
    temporary = path.with_name(TEMPORARY + secrets.token_hex(4))  # `checkpoints.manifest` knows these names
    try:
        with temporary.open("xb") as file:  # a new file's mode follows the umask
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        # A write failed, for example on a full disk, or the temporary file cannot be created.
        if isinstance(error, OSError) and error.filename in (None, str(temporary)) and error.filename2 is None:
            error.filename = str(path)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # sync the folder too: otherwise a crash may undo the rename
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_named(path: Path, text: str) -> None:
    """Write a file that a user has named, as `replace` does: through links, and in place if it cannot be replaced.

    Raises:
        OSError: it cannot be written. A previous file is unchanged if it could have been replaced. The error names it.
    """
    if not path.exists() or path.is_file():  # neither a device nor a pipe
        try:
            replace(Path(os.path.realpath(path)), [text.encode()])
            return
        except OSError as error:
            if error.errno not in _IN_PLACE:
                raise
    path.write_text(text, "utf-8")


def digested(parts: Iterable[Part], update: Callable[[Part], None]) -> Iterator[Part]:
    """Yield the same parts, and pass each to a digest."""
    for part in parts:
        update(part)
        yield part
