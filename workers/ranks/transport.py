"""Requests between the exchange threads of a learner's ranks, over TCP: each rank is connected to each other. asyncio.

A rank connects to those with lower numbers and accepts connections from those with higher ones. The connecting rank
sends the token that the ranks agreed on when they met, and waits for a reply: a TCP connection by itself proves
nothing, since the kernel accepts connections also for a process that is about to die.

A message has a head (msgpack: the kind of request and its number) and may carry a vector's bytes. Each request gets one
answer. A rank begins to work on another rank's requests in the order in which they were sent.

A rank whose process is killed is noticed at once, because the kernel closes its connections; a rank whose machine is
unreachable is noticed after `SILENT_S`. Either breaks this rank's learner: `watch` raises. The rank that finds out
tells all others why before its own connections close; otherwise they would take it for the cause. It also names the
rank that reports to the run (on the bus), which is the lowest rank that is left. That reporter tells all other ranks
too, so that they know it is alive; a rank that cannot reach the reporter reports to the run itself.
"""

import asyncio
import hmac
import itertools
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt
import structlog

from diloco.pipeline.errors import BusError, BusFull, BusUnavailable, DilocoError, RankGone, UsageError
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import as_bytes
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
    """The part of `asyncio.StreamWriter` that `Transport` uses."""

    def write(self, data: bytes | memoryview, /) -> None:
        """Send bytes, in order."""

    async def drain(self) -> None:
        """Wait until there is room for more; raise OSError if nobody reads any more."""

    def close(self) -> None:
        """Stop sending."""

    async def wait_closed(self) -> None:
        """Wait until the writer is closed."""


Streams = tuple[asyncio.StreamReader, Writer]


class Connections(Protocol):
    """The way in which one rank is connected to the others."""

    rank: int
    ranks: int

    async def connect(self) -> dict[int, Streams]:
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


class TcpConnections:
    """`Connections` over TCP."""

    def __init__(self, rank: int, addresses: Sequence[tuple[str, int]], listener: socket.socket, token: bytes) -> None:
        """addresses: of all ranks. token: proves that a connecting process is one of them."""
        self.rank, self.ranks = rank, len(addresses)
        self._addresses, self._listener, self._token = addresses, listener, token
        self._connections: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._all_here = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def connect(self) -> dict[int, Streams]:
        """Connect to all other ranks; implements `Connections.connect`."""
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
            missing = [r for r in range(self.ranks) if r != self.rank and r not in self._connections]
            raise RankGone(f"rank {self.rank} of this learner cannot reach ranks {missing}: {error!r}") from error
        except BaseException:
            self._give_up()
            raise
        return dict(self._connections)

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
            if other not in self._connections:
                raise
        except OSError:  # it is not reachable from here, but may still connect to this rank
            pass
        await asyncio.Event().wait()

    def close(self) -> None:
        """Refuse all connections from now on; implements `Connections.close`."""
        if self._server is not None:
            self._server.close()

    def _give_up(self) -> None:
        self.close()
        for _, writer in self._connections.values():
            writer.close()

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                token, other = _HELLO.unpack(await reader.readexactly(_HELLO.size))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            token, other = b"", 0
        if (
            not hmac.compare_digest(token, self._token)
            or not self.rank < other < self.ranks
            or other in self._connections
        ):
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
        self._connections[other] = reader, writer
        _note(line.fileno())
        if len(self._connections) == self.ranks - 1:
            self._all_here.set()


Float32 = npt.NDArray[np.float32]
T = TypeVar("T")
# Called with the rank that asks, then the request's arguments, a vector last. It must return what msgpack can encode.
Handler = Callable[..., Awaitable[Any]]

# Bytes written or read at a time.
SLICE_BYTES = 2**20
MAX_HEAD_BYTES = 16 * 2**20
# Seconds that the other ranks get to hear why this rank ends (`INFORM_S`), and that a report to the bus may take
# (`REPORT_S`).
INFORM_S, REPORT_S = 5.0, 2.0
# The kinds of error that travel to the asking rank; every other one travels as UsageError. The asking rank retries
# after those of the bus.
KINDS = {kind.__name__: kind for kind in (UsageError, BusError, BusUnavailable, BusFull)}
_SIZES = struct.Struct("<IQ")


class Transport:
    """One rank's connections. Use it in `async with`: nothing is connected before."""

    def __init__(self, lines: Connections, most: int) -> None:
        """most: largest number of elements in a vector."""
        self.rank, self.ranks = lines.rank, lines.ranks
        self._connections, self._most = lines, most
        self._handlers: dict[str, Handler] = {"broken": self._take_broken}
        self._writers: dict[int, Writer] = {}
        self._locks = [asyncio.Lock() for _ in range(lines.ranks)]
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        """Maps the number of a request to the rank that was asked and to its answer."""
        self._tasks = set[asyncio.Task[Any]]()
        self._receivers: dict[int, asyncio.Task[None]] = {}
        """Maps a rank to the task that reads from it until the connection ends."""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.leaving = False
        """True once the ranks leave: connections that end are then no error."""
        self.reason = ""
        """The reason for which all ranks end, once a rank has given one. Connections that end then have it too."""
        self._gone_ranks = set[int]()
        self._informed = {self.rank}
        """Ranks that know the reason."""
        self._reporter = -1
        """The rank that reports to the run; -1 until it is known."""

    def handle(self, **handlers: Handler) -> None:
        """Register handlers for requests, by kind."""
        self._handlers |= handlers

    async def __aenter__(self) -> Self:
        """Connect to all other ranks. Requests are answered from now on: call `handle` before.

        Raises:
            RankGone: a rank does not answer in time.
        """
        for other, (reader, writer) in (await self._connections.connect()).items():
            self._writers[other] = writer
            self._receivers[other] = self.start_task(self._receive(other, reader))
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        found = self._found or error
        if not self.reason and isinstance(found, Exception) and not (self.leaving and isinstance(found, RankGone)):
            await self.end_all(self._worded(found))
        elif self.reports:
            await self.end_all(self.reason)
        self.leaving = True
        self._connections.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers.values():
            writer.close()
        for writer in self._writers.values():
            with suppress(OSError):
                await writer.wait_closed()

    @property
    def _found(self) -> BaseException | None:
        """The error that broke this rank; None if there is none."""
        if not self._broken.done() or self._broken.cancelled():  # cancelled with its watcher, by an error elsewhere
            return None
        return self._broken.exception()  # reading it marks it as retrieved: asyncio logs nothing

    def _worded(self, error: BaseException) -> str:
        if isinstance(error, RankGone):
            return str(error)
        how = f"{error!s:.400}" if isinstance(error, DilocoError) else f"{error!r:.400}"
        return f"rank {self.rank} of this learner has ended: {how}"

    @property
    def reports(self) -> bool:
        """True if this rank is the one that reports `why` to the run. Valid once all is over."""
        return self._reporter == self.rank

    async def end(self, why: str) -> None:
        """Make all ranks end for this reason, this rank's exchange and every waiter here included."""
        self._break(RankGone(why))
        await asyncio.sleep(INFORM_S + REPORT_S)

    async def end_all(self, why: str, reported: bool = False) -> None:
        """Make all other ranks end for this reason; this one is about to. reported: it reports to the run itself."""
        self.reason = why
        reporter = self.rank if reported or self.reports else min({*range(self.ranks)} - self._gone_ranks)
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        with suppress(TimeoutError):
            async with asyncio.timeout(INFORM_S):
                await asyncio.gather(*(self._tell(rank, reporter) for rank in others), return_exceptions=True)
        if not reported:
            self._reporter = reporter if reporter in self._informed else self.rank

    async def _tell(self, rank: int, reporter: int) -> None:
        await self.ask(rank, "broken", self.reason, reporter)
        self._informed.add(rank)

    async def cause(self, within_s: float) -> str:
        """Return the reason for which all ranks end if it becomes known within `within_s` seconds, else ""."""
        with suppress(TimeoutError, DilocoError):
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._broken)
        found = self._found
        return self.reason or ("" if found is None else self._worded(found))

    async def watch(self) -> None:
        """Wait until a rank is gone; never returns normally.

        Raises:
            RankGone: names the rank.
            DilocoError: a handler or task whose result nobody awaits has failed.
        """
        await self._broken

    async def until_gone(self, rank: int) -> None:
        """Wait for the connection to another rank to end. If it ends too early, `watch` raises as well."""
        await asyncio.wait({self._receivers[rank]})

    async def ask(self, rank: int, what: str, *said: Any, vector: Float32 | None = None) -> Any:
        """Send a request to a rank and return its answer.

        Raises:
            UsageError, BusError: the handler there raised it.
            RankGone: the rank is gone.
        """
        if rank == self.rank:
            return await self._handlers[what](rank, *said, *([] if vector is None else [vector]))
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = rank, answer
        try:
            # Shielded: a message must be written to its end even if the caller is cancelled, since the receiver would
            # read the next message as the rest of this one.
            await asyncio.shield(self.start_task(self._write(rank, [number, what, *said], vector)))
            return await answer
        finally:
            self._asked.pop(number, None)

    def tell(self, rank: int, what: str, *said: Any) -> None:
        """Send a request to a rank without waiting for an answer."""
        self.start_task(self.ask(rank, what, *said))

    # --- inside -------------------------------------------------------------------------------------------

    def start_task(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a task; if it fails, this rank's learner is broken (`watch` raises)."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._broken.done() and not self.leaving:
            self._broken.set_exception(error)

    async def _take_broken(self, rank: int, why: str, reporter: int) -> None:
        self._informed.add(rank)
        if not self.reason:
            self.reason, self._reporter = why, reporter
        self._break(RankGone(self.reason))

    async def _write(self, rank: int, head: list[Any], vector: Float32 | None = None) -> None:
        packed: bytes = msgpack.packb([vector is not None, *head])
        data = memoryview(b"") if vector is None else as_bytes(vector)
        try:
            async with self._locks[rank]:
                if (writer := self._writers.get(rank)) is None:
                    raise ConnectionError("it is no longer connected")
                writer.write(_SIZES.pack(len(packed), len(data)) + packed)
                for start in range(0, len(data), SLICE_BYTES):
                    writer.write(data[start : start + SLICE_BYTES])
                    await writer.drain()
                await writer.drain()
        except OSError as error:
            raise self._gone(rank, error) from error

    def _gone(self, rank: int, error: BaseException) -> RankGone:
        self._gone_ranks.add(rank)
        if self.reason:
            return RankGone(self.reason)
        how = "is gone" if isinstance(error, (OSError, EOFError)) else f"sent unreadable data ({error}): it is gone"
        return RankGone(f"rank {rank} of this learner {how}, and the learner with it: start all of its ranks again")

    async def _receive(self, rank: int, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size, nbytes = _SIZES.unpack(await reader.readexactly(_SIZES.size))
                if size > MAX_HEAD_BYTES or nbytes > 4 * self._most or nbytes % 4:
                    raise ValueError(f"a head of {size} and a vector of {nbytes} bytes cannot come from a rank")
                has_vector, number, what, *said = msgpack.unpackb(await reader.readexactly(size))
                if what is not None and what not in self._handlers:
                    raise ValueError(f"{what!r:.40} is not a known request")
                if has_vector:
                    said.append(await _read_vector(reader, nbytes))
                self._dispatch(rank, number, what, said)
        except (OSError, asyncio.IncompleteReadError, ValueError, TypeError) as error:
            gone = self._gone(rank, error)
            self._break(gone)
            self._writers.pop(rank).close()  # later requests to this rank fail at once
            for of, answer in self._asked.values():
                if of == rank and not answer.done():
                    answer.set_exception(gone)
                    answer.exception()

    def _dispatch(self, rank: int, number: int, what: str | None, said: list[Any]) -> None:
        # Tasks start in the order of their creation, so a rank's requests are begun in the order in which it sent them.
        if what is not None:
            self.start_task(self._answer(rank, number, what, said))
        elif number in self._asked and not (answer := self._asked[number][1]).done():
            kind, found = said
            if kind is None:
                answer.set_result(found)
            elif kind in KINDS:
                answer.set_exception(KINDS[kind](found))
            else:
                raise ValueError(f"{kind!r:.40} is not a known kind of error")

    async def _answer(self, rank: int, number: int, what: str, said: list[Any]) -> None:
        kind = found = None
        try:
            found = await self._handlers[what](rank, *said)
        except RankGone:
            raise
        except DilocoError as error:
            if not isinstance(error, BusError):  # an outage is logged by the rank that retries
                structlog.get_logger().error("rank_failed", rank=self.rank, doing=what, error=str(error))
            kind = next((one.__name__ for one in type(error).__mro__ if one.__name__ in KINDS), UsageError.__name__)
            found = str(error)
        await self._write(rank, [number, None, kind, found])


async def _read_vector(reader: asyncio.StreamReader, nbytes: int) -> Float32:
    vector = pooled(nbytes // 4, np.float32)
    data, done = as_bytes(vector), 0
    while done < nbytes:
        piece = await reader.read(min(SLICE_BYTES, nbytes - done))
        if not piece:
            raise ConnectionError("the connection was closed in mid-vector")
        data[done : done + len(piece)] = piece
        done += len(piece)
    return vector
