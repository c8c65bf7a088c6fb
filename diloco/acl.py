"""`diloco acl`: make an ACL file for Redis 7, with a user for each party of a run.

Passwords are never arguments, which other users of the machine could read. A password is taken from the environment
(REDIS_SYNCER_PASSWORD ...), else from a file of such lines, else generated and appended to that file. The ACL file
holds only their hashes.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path

from diloco.pipeline.bus import acl
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.appending import append_whole
from diloco.pipeline.files.writable import check_files
from diloco.pipeline.messages.wire import party_name

HEADER = """\
# Users of a Redis 7 for Decoupled DiLoCo: each party has only the rights that it needs. Created by `diloco acl`.
# Redis accepts no comments in this file: remove them first, as deploy/redis.sh does.
"""
# Minimum length of a password that is not generated here (generated ones have 48 characters).
MIN_PASSWORD_CHARS = 12


def variable(user: str) -> str:
    """Return the name of the variable that holds a user's password."""
    return f"REDIS_{re.sub(r'[^A-Z0-9]', '_', user.upper())}_PASSWORD"


def template() -> str:
    """Return the shipped file deploy/users.acl: users of any run, with names of variables in place of hashes."""
    lines = (user.line(f"{{{variable(user.name)}}}") for user in acl.users())
    return HEADER + "\n".join((acl.NOBODY, *lines)) + "\n"


def acl_file(users: Iterable[acl.User], passwords: Mapping[str, str]) -> str:
    """Return the ACL lines of users. `passwords` has one for each variable."""
    lines = []
    for user in users:
        digest = hashlib.sha256(passwords[variable(user.name)].encode()).hexdigest()
        lines.append(user.line(digest))
    return "\n".join((acl.NOBODY, *lines)) + "\n"


def gather_passwords(names: Iterable[str], environ: Mapping[str, str], file: Path | None) -> dict[str, str]:
    """Return passwords by variable: from the environment, from the file, or generated and appended to the file.

    Raises:
        UsageError: a password is missing and there is no file to keep it in, is too short, or belongs to two users.
    """
    found = {**_read(file), **{name: environ[name] for name in names if environ.get(name)}}
    missing = [name for name in names if name not in found]
    if missing and file is None:
        raise UsageError(
            f"no password in {', '.join(missing)}: set them, or pass --passwords FILE to have them generated"
        )
    made = {name: secrets.token_hex(24) for name in missing}
    passwords = {name: (found | made)[name] for name in names}
    for name, password in passwords.items():
        if len(password) < MIN_PASSWORD_CHARS:
            raise UsageError(f"{name} is shorter than {MIN_PASSWORD_CHARS} characters: choose a longer one")
    if len(set(passwords.values())) < len(passwords):
        raise UsageError("two users have the same password, so each could log in as the other: give each its own")
    if made and file is not None:
        _append(file, "".join(f"{name}={password}\n" for name, password in made.items()))
    return passwords


def _append(file: Path, lines: str) -> None:
    created = not file.exists()
    with FileIO(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out:
        try:
            append_whole(out, lines.encode())
        except OSError as error:
            if created:
                file.unlink()
            raise UsageError(f"cannot write the passwords to {file}: {error.strerror}") from error


def _read(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    if not file.is_file():
        check_files(file)
        if file.exists():
            raise UsageError(f"{file}: a device or pipe, not a file")
        return {}
    if file.stat().st_mode & 0o077:
        raise UsageError(f"other users can read {file}: run chmod 600 {file}")
    lines = (
        line.partition("=") for line in file.read_text("utf-8-sig").splitlines() if line and not line.startswith("#")
    )
    return {name.strip(): value.strip() for name, _, value in lines}


def make(run: str, learners: list[str], passwords: Path | None, failover: bool = False) -> str:
    """Return the ACL file of a run; failover: with the users of servers that replace each other.

    Raises:
        UsageError: a name is not valid or occurs twice, or a password is missing.
    """
    for name in (*learners, *(() if run == "*" else (run,))):
        try:
            party_name(name)
        except ValueError as error:
            raise UsageError(f"{name!r} {error}") from None
    if twice := sorted({name for name in learners if learners.count(name) > 1}):
        raise UsageError(f"--learner {twice[0]} is given twice: name each learner once")
    users = acl.users(run, learners) + (acl.servers() if failover else [])
    names = [variable(user.name) for user in users]
    if not failover:
        kept = _read(passwords)
        if left_out := [name for name in (variable(user.name) for user in acl.servers()) if name in kept]:
            raise UsageError(
                f"{passwords} has {', '.join(left_out)}: without these users, servers cannot take over from each other",
                "pass --failover, or remove their lines from that file",
            )
    if len(set(names)) < len(names):
        raise UsageError("the passwords of two learners would be in the same variable: choose names that differ more")
    return acl_file(users, gather_passwords(names, os.environ, passwords))
