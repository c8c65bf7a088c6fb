"""Plain commands to a Redis server over one blocking socket, for what a benchmark asks beside the program's own bus."""

import socket
from typing import Any, Self
from urllib.parse import unquote, urlparse

import hiredis

from diloco.pipeline.errors import UsageError


def packed(*words: str | int | bytes) -> bytes:
    """A command as it travels."""
    return bytes(hiredis.pack_command(words))  # type: ignore[arg-type]  # its stubs say: a tuple of one


def connected(url: str) -> socket.socket:
    """A socket on which the server takes commands.

    Raises:
        UsageError: the URL is of a kind that benchmarks do not speak, or nobody answers.
    """
    where = urlparse(url)
    try:
        if where.scheme == "unix":
            link = socket.socket(socket.AF_UNIX)
            link.connect(where.path)
        elif where.scheme == "redis":
            link = socket.create_connection((where.hostname or "localhost", where.port or 6379))
        else:
            raise UsageError(f"benchmarks speak redis:// and unix://, not {where.scheme}://")
    except OSError as error:
        raise UsageError(f"Redis does not answer at {where.hostname or where.path}: {error}") from error
    if where.password:
        words = ("AUTH", *((where.username,) if where.username else ()), unquote(where.password))
        link.sendall(packed(*words))
        if not (answer := link.recv(256)).startswith(b"+OK"):
            raise UsageError("Redis refuses the login", said=answer.decode(errors="replace").strip())
    return link


def answered(link: socket.socket, reader: hiredis.Reader, *words: str | int) -> Any:
    """A command's answer, or its error, as the reader reads them.

    Raises:
        ConnectionError: the server hung up.
    """
    link.sendall(packed(*words))
    while (answer := reader.gets()) is False:
        if not (piece := link.recv(2**16)):
            raise ConnectionError("the server closed the connection")
        reader.feed(piece)
    return answer


class Plain:
    """One connection; for the time of a `with` block."""

    def __init__(self, url: str) -> None:
        self._link, self._reader = connected(url), hiredis.Reader()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def ask(self, *words: str | int) -> Any:
        """A command's answer."""
        answer = answered(self._link, self._reader, *words)
        if isinstance(answer, Exception):
            raise UsageError(f"Redis: {' '.join(map(str, words[:2]))}: {answer}")
        return answer

    def info(self, name: str) -> str:
        """One field of INFO."""
        lines = self.ask("INFO").decode().splitlines()
        return str(next((line.partition(":")[2] for line in lines if line.startswith(f"{name}:")), ""))

    def server(self) -> str:
        """Its version; of Valkey, which gives itself out for a Redis 7.2, with the name."""
        own = self.info("valkey_version")
        return f"valkey {own}" if own else self.info("redis_version")

    def remove(self, pattern: str) -> None:
        """Delete all keys that match."""
        cursor: Any = b"0"
        while True:
            cursor, keys = self.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            if keys:
                self.ask("UNLINK", *keys)
            if cursor == b"0":
                return
