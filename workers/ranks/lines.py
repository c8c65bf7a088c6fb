"""TCP connections from a rank to all other ranks of its learner. asyncio.

A rank connects to those with lower numbers and accepts connections from those with higher ones. The connecting rank
sends the token that the ranks agreed on when they met, and waits for a reply: a TCP connection by itself proves
nothing, since the kernel accepts connections also for a process that is about to die.
"""

import asyncio
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

from diloco.pipeline.errors import RankGone
from diloco.pipeline.waiting import meanwhile

SILENT_S = 20
CONNECT_S = 60.0
TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")
_TAKEN = b"\1"


# (file descriptor, inode) of sockets to other ranks; some may be closed by now. The inode tells whether the descriptor
# still belongs to the same socket.
_ours: set[tuple[int, int]] = set()


def _is_open(one: tuple[int, int]) -> bool:
    fd, inode = one
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def _note(fd: int) -> None:
    _ours.intersection_update([one for one in _ours if _is_open(one)])
    _ours.add((fd, os.fstat(fd).st_ino))


def _let_go() -> None:
    """Close the sockets in a forked child, such as a data-loading worker: an open copy would make a dead rank look
    alive."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in _ours:
        if _is_open(one):
            os.dup2(nothing, one[0], inheritable=False)  # keep the number in use: its Python owner may close it
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Writer(Protocol):
    """The part of `asyncio.StreamWriter` that `Wires` uses."""

    def write(self, data: bytes | memoryview, /) -> None:
        """Send bytes, in order."""

    async def drain(self) -> None:
        """Wait until there is room for more; raise OSError if nobody reads any more."""

    def close(self) -> None:
        """Stop sending."""

    async def wait_closed(self) -> None:
        """Wait until the writer is closed."""


Line = tuple[asyncio.StreamReader, Writer]


class Lines(Protocol):
    """The way in which one rank is connected to the others."""

    rank: int
    ranks: int

    async def connect(self) -> dict[int, Line]:
        """Connect to all other ranks; return the connections by rank. Nothing is read from them yet.

        Raises:
            RankGone: a rank does not answer in time.
        """

    def close(self) -> None:
        """Refuse all connections from now on: they cannot come from a rank."""


def listen(host: str = "") -> socket.socket:
    """Return a socket for the other ranks. host: "" binds all addresses, of IPv6 too where there is any."""
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # there is no IPv6 here, or the host is an IPv4 address
        listener = socket.create_server((host, 0))
    _note(listener.fileno())
    return listener


class TcpLines:
    """`Lines` over TCP."""

    def __init__(self, rank: int, addresses: Sequence[tuple[str, int]], listener: socket.socket, token: bytes) -> None:
        """addresses: of all ranks. token: proves that a connecting process is one of them."""
        self.rank, self.ranks = rank, len(addresses)
        self._addresses, self._listener, self._token = addresses, listener, token
        self._lines: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._all_here = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def connect(self) -> dict[int, Line]:
        """Connect to all other ranks; implements `Lines.connect`."""
        self._server = await asyncio.start_server(self._called, sock=self._listener)
        above = range(self.rank + 1, self.ranks)
        try:
            async with asyncio.timeout(CONNECT_S), meanwhile(*map(self._watch, above)):
                for other in range(self.rank):
                    reader, writer = await asyncio.open_connection(*self._addresses[other])
                    writer.write(_HELLO.pack(self._token, self.rank))
                    try:
                        if await reader.read(1) != _TAKEN:
                            raise ConnectionError(f"rank {other} hangs up")
                    except BaseException:
                        writer.close()
                        raise
                    self._connected(other, reader, writer)
                if self.ranks > 1:
                    await self._all_here.wait()
        except (OSError, TimeoutError) as error:
            self._give_up()
            missing = [r for r in range(self.ranks) if r != self.rank and r not in self._lines]
            raise RankGone(f"rank {self.rank} of this learner cannot reach ranks {missing}: {error!r}") from error
        except BaseException:
            self._give_up()
            raise
        return dict(self._lines)

    async def _watch(self, other: int) -> None:
        """Notice that a higher rank dies before it connects: its listener closes with it. Runs until cancelled.

        Raises:
            ConnectionError: the rank has died.
        """
        try:
            reader, writer = await asyncio.open_connection(*self._addresses[other])
            try:
                await reader.read(1)  # a living rank sends nothing on this connection
            finally:
                writer.close()
            raise ConnectionError(f"rank {other} has ended")
        except ConnectionError:
            if other not in self._lines:
                raise
        except OSError:  # it is not reachable from here, but may still connect to this rank
            pass
        await asyncio.Event().wait()

    def close(self) -> None:
        """Refuse all connections from now on; implements `Lines.close`."""
        if self._server is not None:
            self._server.close()

    def _give_up(self) -> None:
        self.close()
        for _, writer in self._lines.values():
            writer.close()

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                token, other = _HELLO.unpack(await reader.readexactly(_HELLO.size))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            token, other = b"", 0
        if not hmac.compare_digest(token, self._token) or not self.rank < other < self.ranks or other in self._lines:
            writer.close()
            return
        writer.write(_TAKEN)
        self._connected(other, reader, writer)

    def _connected(self, other: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = writer.get_extra_info("socket")
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ("TCP_KEEPIDLE", SILENT_S // 4), ("TCP_KEEPINTVL", SILENT_S // 4), ("TCP_KEEPCNT", 3):
            if hasattr(socket, name):
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)
        self._lines[other] = reader, writer
        _note(line.fileno())
        if len(self._lines) == self.ranks - 1:
            self._all_here.set()
