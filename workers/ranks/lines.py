"""Connections of a rank to all others of its learner, over TCP. asyncio.

A rank calls those below it, and is called by those above it. Who calls shows the token that the ranks agreed on as
they met, and is answered: the system takes calls also for a rank that is about to die.
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


_ours: set[tuple[int, int]] = set()
"""(file descriptor, inode) of sockets to other ranks, some closed by now."""


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
    """In a child that was forked, such as one that loads data: while it had them open, a dead rank would look alive."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in _ours:
        if _is_open(one):
            os.dup2(nothing, one[0], inheritable=False)  # the number stays taken: the copy of its owner may close it
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Writer(Protocol):
    """What `Wires` needs of an `asyncio.StreamWriter`."""

    def write(self, data: bytes | memoryview, /) -> None:
        """Send, in order."""

    async def drain(self) -> None:
        """Until there is room for more; raises OSError where nobody reads any more."""

    def close(self) -> None:
        """Send no more."""

    async def wait_closed(self) -> None:
        """Until that is so."""


Line = tuple[asyncio.StreamReader, Writer]


class Lines(Protocol):
    """How one rank is connected to the others."""

    rank: int
    ranks: int

    async def connect(self) -> dict[int, Line]:
        """To each other rank, by its number. What comes is read later.

        Raises:
            RankGone: one does not answer in time.
        """

    def close(self) -> None:
        """Whoever calls from now on is no rank."""


def listen(host: str = "") -> socket.socket:
    """A socket on which other ranks will call. host: "": any address of this machine, of IPv6 too where it has that."""
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # it has none, or the host is one of IPv4
        listener = socket.create_server((host, 0))
    _note(listener.fileno())
    return listener


class TcpLines:
    """`Lines` over TCP."""

    def __init__(self, rank: int, addresses: Sequence[tuple[str, int]], listener: socket.socket, token: bytes) -> None:
        """addresses: of all ranks. token: shows that who calls is one of them."""
        self.rank, self.ranks = rank, len(addresses)
        self._addresses, self._listener, self._token = addresses, listener, token
        self._lines: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._all_here = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def connect(self) -> dict[int, Line]:
        """As `Lines`."""
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
        """Notice that a rank dies before it calls: its listener goes with it. Until cancelled.

        Raises:
            ConnectionError: it has.
        """
        try:
            reader, writer = await asyncio.open_connection(*self._addresses[other])
            try:
                await reader.read(1)  # it says nothing here
            finally:
                writer.close()
            raise ConnectionError(f"rank {other} has ended")
        except ConnectionError:
            if other not in self._lines:
                raise
        except OSError:  # it cannot be called from here: it may call
            pass
        await asyncio.Event().wait()

    def close(self) -> None:
        """As `Lines`."""
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
