"""Early checks that files can be written, before hours of work go into them; and messages about missing permissions."""

import os
import pwd
import stat
import tempfile
from pathlib import Path

from diloco.pipeline.errors import UsageError

# Prefix of the temporary folders of a check; they are deleted at once.
TRIED = ".tried-"
TRIED_BYTES = 4096


def check_files(*files: Path | None) -> None:
    """Check that files can be written, without creating them.

    Raises:
        UsageError: one cannot be written.
    """
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            raise UsageError(f"{file}: a folder, not a file")
        if not file.absolute().parent.is_dir():
            raise UsageError(f"{file}: the folder {file.parent} does not exist")
        if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise UsageError(f"{file}: no permission to write it")


def try_folder(path: Path, *files: str) -> None:
    """Write to a folder, or to the place where it would be created, and delete what was written.

    files: existing files in the folder that are opened for writing.

    Raises:
        UsageError: this process's user lacks the permission.
        NotADirectoryError: the place is not a folder.
        OSError: writing fails for another reason, such as a full disk; its cause has the number.
    """
    path = path.absolute()
    there = _nearest(path)
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is not a folder")
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


def error_text(error: OSError) -> str:
    """Return a readable error; if the file belongs to another user, with a remedy."""
    theirs = isinstance(error, PermissionError) and isinstance(error.filename, str)
    return str(denied(Path(error.filename)) if theirs else error)


def denied(path: Path) -> UsageError:
    """Return the error for a path that this process's user may not read, write or create."""
    there = _nearest(path.absolute())
    found, user = there.lstat(), os.geteuid()
    who, whose = _name(user), _name(found.st_uid)
    mend = f"chmod u+rwX {there}" if found.st_uid == user else f"run as {whose}, or chown -R {user} {there}"
    about = f"{who} has no permission to use {path}: {there} is {stat.filemode(found.st_mode)} of {whose}"
    return UsageError(about, f"{mend}, or choose another location")


def _nearest(path: Path) -> Path:
    """Return the path itself, or its closest parent that exists; a dangling link counts as existing."""
    return next(one for one in (path, *path.parents) if os.path.lexists(one))


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:  # in a container, a uid need not have a name
        return f"user {uid}"
