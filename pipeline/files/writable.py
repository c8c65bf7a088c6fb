"""Whether files can be written, asked before anything is computed that goes into them; and who may not."""

import os
import pwd
import stat
import tempfile
from pathlib import Path

from diloco.pipeline.errors import UsageError

TRIED = ".tried-"
"""How the name of what is written to try a place begins; it goes at once."""
TRIED_BYTES = 4096


def check_files(*files: Path | None) -> None:
    """Without making them.

    Raises:
        UsageError: one cannot be written.
    """
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            raise UsageError(f"{file}: a folder, not a file")
        if not file.absolute().parent.is_dir():
            raise UsageError(f"{file}: there is no folder {file.parent}")
        if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise UsageError(f"{file}: it may not be written")


def try_folder(path: Path, *files: str) -> None:
    """Write to a folder, or to the one that it would be made in; nothing is left there. files: it opens those there.

    Raises:
        UsageError: this process's user may not.
        OSError: nothing can be written there now, such as on a full disk.
    """
    path = path.absolute()
    there = _nearest(path)
    if not there.is_dir():
        raise OSError(f"{there} is no folder")
    try:
        with tempfile.TemporaryDirectory(prefix=TRIED, dir=there) as tried:
            made = Path(tried) / path.relative_to(there)
            made.mkdir(parents=True, exist_ok=True)
            (made / "file").write_bytes(bytes(TRIED_BYTES))
        for path in filter(os.path.lexists, [path / file for file in files]):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except PermissionError as error:
        raise denied(path) from error
    except OSError as error:
        raise OSError(f"{there}: {error.strerror or error}") from error


def said(error: OSError) -> str:
    """What is wrong, for people: of a file that is another user's, what to do about it too."""
    theirs = isinstance(error, PermissionError) and isinstance(error.filename, str)
    return str(denied(Path(error.filename)) if theirs else error)


def denied(path: Path) -> UsageError:
    """What to raise where this process's user may not read or write a path, or make it."""
    there = _nearest(path.absolute())
    found, user = there.lstat(), os.geteuid()
    who, whose = _name(user), _name(found.st_uid)
    mend = f"chmod u+rwX {there}" if found.st_uid == user else f"start as {whose}, chown -R {user} {there}"
    about = f"{who} may not use {path}: {there} is {stat.filemode(found.st_mode)} of {whose}"
    return UsageError(about, f"{mend}, or name another place")


def _nearest(path: Path) -> Path:
    """Itself, or the folder above it that is there; a link to nothing is in the way."""
    return next(one for one in (path, *path.parents) if os.path.lexists(one))


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:  # of a container
        return f"user {uid}"
