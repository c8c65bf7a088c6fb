"""Requests between the exchange threads of a learner's ranks, over TCP: each rank is connected to each other.

docs/explanation/ranks.md says why torch.distributed cannot carry them ("Their links").

The connections are made while the ranks meet (`call_lower_ranks`, `accept_calls`). A message has a head (msgpack: the
number and the kind of request) and may carry a vector. Each request gets one answer. A rank begins to work on another
rank's requests in the order in which they were sent.

A rank that is gone breaks this rank's learner: `watch` raises. Whoever finds out tells all others the reason before its
own connections close, and the lowest rank that is left reports it on the bus ("When a rank dies").
"""

import asyncio
import hmac
import itertools
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self, TypeVar

import msgpack
import numpy as np
import structlog

from diloco.pipeline.errors import BusError, BusFull, BusUnavailable, DilocoError, RankGone, UsageError
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import as_bytes
from diloco.pipeline.waiting import cancel
from diloco.workers.encoding import Float32
from diloco.workers.ranks.placement import SLICE

T = TypeVar("T")
# Called with the rank that asks, then the request's arguments, a vector last. It must return what msgpack can encode.
Handler = Callable[..., Awaitable[Any]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

SILENT_S = 20
# Seconds for all ranks to connect.
CONNECT_S = 60.0
# Callers that have not said who they are, of which the oldest is dropped beyond this number.
MAX_CALLERS = 64
TOKEN_BYTES = 32
MAX_HEAD_BYTES = 16 * 2**20
# Seconds that the other ranks get to hear why this rank ends (`INFORM_S`), and that a report to the bus may take
# (`REPORT_S`).
INFORM_S, REPORT_S = 5.0, 2.0
# The kinds of error that travel to the asking rank; every other one travels as UsageError. The asking rank retries
# after those of the bus.
KINDS = {kind.__name__: kind for kind in (UsageError, BusError, BusUnavailable, BusFull)}
_HELLO, _SIZES = struct.Struct(f"<{TOKEN_BYTES}sI"), struct.Struct("<IQ")
# All sockets of this process's ranks.
_sockets = weakref.WeakSet[socket.socket]()


def _close_in_child() -> None:
    """Close the sockets in a forked child, such as a data-loading worker: a copy would make a dead rank look alive."""
    for one in _sockets:
        one.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def listen(host: str = "") -> socket.socket:
    """Return a socket for the other ranks. host: "" binds all addresses, of IPv6 too where there is any."""
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # there is no IPv6 here, or the host is an IPv4 address
        listener = socket.create_server((host, 0))
    _sockets.add(listener)
    return listener


def call_lower_ranks(rank: int, addresses: Sequence[tuple[str, int]], token: bytes) -> dict[int, socket.socket]:
    """Connect to all ranks with lower numbers; return the connections by rank. token: proves that this is a rank.

    Raises:
        RankGone: a rank cannot be reached.
    """
    connections = {}
    with ExitStack() as opened:
        for other in range(rank):
            try:
                connection = opened.enter_context(socket.create_connection(addresses[other], timeout=CONNECT_S))
                connection.sendall(_HELLO.pack(token, rank))
            except OSError as error:
                raise RankGone(f"rank {rank} of this learner cannot reach rank {other}: {error!r}") from error
            connections[other] = _prepared(connection)
        opened.pop_all()
    return connections


def accept_calls(listener: socket.socket, rank: int, ranks: int, token: bytes) -> dict[int, socket.socket]:
    """Accept the connections of all ranks with higher numbers, which have called already; return them by rank.

    Raises:
        RankGone: a rank has not called.
    """
    connections = dict[int, socket.socket]()
    hellos = dict[socket.socket, bytes]()  # what each caller has said so far
    until_s = time.monotonic() + CONNECT_S
    listener.setblocking(False)
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(connections) < ranks - 1 - rank:
                # All callers are read at once, so that a silent stranger holds up nobody.
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    missing = sorted({*range(rank + 1, ranks)} - connections.keys())
                    raise RankGone(f"ranks {missing} of this learner have not connected to rank {rank}")
                for key, _ in selector.select(left_s):
                    caller = key.data
                    if caller is None:
                        with suppress(OSError):  # the caller has hung up
                            _accept(listener, hellos, selector)
                    elif caller in hellos and (other := _heard(caller, hellos, token)) is not None:
                        selector.unregister(caller)
                        del hellos[caller]
                        if rank < other < ranks and other not in connections:
                            connections[other] = _prepared(opened.enter_context(caller))
                        else:
                            caller.close()
        finally:
            for caller in hellos:
                caller.close()
        opened.pop_all()
    return connections


def _accept(listener: socket.socket, hellos: dict[socket.socket, bytes], selector: selectors.BaseSelector) -> None:
    """Accept a caller; the oldest of too many is dropped, a stranger, since a rank's hello is there at once."""
    caller, _ = listener.accept()
    caller.setblocking(False)
    hellos[caller] = b""
    selector.register(caller, selectors.EVENT_READ, caller)
    if len(hellos) > MAX_CALLERS:
        oldest = next(iter(hellos))
        selector.unregister(oldest)
        del hellos[oldest]
        oldest.close()


def _heard(caller: socket.socket, hellos: dict[socket.socket, bytes], token: bytes) -> int | None:
    """Read what a caller has sent; return its rank, -1 if it is none, None while its hello is not whole."""
    try:
        more = caller.recv(_HELLO.size - len(hellos[caller]))
    except BlockingIOError:
        return None
    except OSError:
        return -1
    hellos[caller] += more
    if len(hellos[caller]) < _HELLO.size:
        return None if more else -1
    claimed, other = _HELLO.unpack(hellos[caller])
    return int(other) if hmac.compare_digest(claimed, token) else -1


def _prepared(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {"KEEPIDLE": SILENT_S // 4, "KEEPINTVL": SILENT_S // 4, "KEEPCNT": 3, "USER_TIMEOUT": 1000 * SILENT_S}
    for name, value in limits.items():
        if hasattr(socket, f"TCP_{name}"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
    _sockets.add(connection)
    return connection


class Transport:
    """One rank's connections. Use it in `async with`."""

    def __init__(self, rank: int, ranks: int, streams: Callable[[], Awaitable[Mapping[int, Streams]]]) -> None:
        """streams: returns the streams of the connections, by rank; it is called on entry."""
        self.rank, self.ranks, self._streams = rank, ranks, streams
        self._handlers: dict[str, Handler] = {"broken": self._take_broken}
        self._writers: dict[int, asyncio.StreamWriter] = {}
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
        self._reported = False
        """True if a rank reports the reason to the run whichever ranks are left."""
        self._left = {self.rank}
        """Ranks that are known to live since there is a reason."""

    @classmethod
    def over(cls, rank: int, connections: Mapping[int, socket.socket]) -> Self:
        """Return the transport over the connections made while the ranks met, by rank."""

        async def streams() -> dict[int, Streams]:
            limit = 4 * SLICE
            return {other: await asyncio.open_connection(sock=one, limit=limit) for other, one in connections.items()}

        return cls(rank, len(connections) + 1, streams)

    def handle(self, **handlers: Handler) -> None:
        """Register handlers for requests, by kind."""
        self._handlers |= handlers

    async def __aenter__(self) -> Self:
        """Begin to answer requests: call `handle` before.

        Raises:
            RankGone: the ranks are not connected.
        """
        for other, (reader, writer) in (await self._streams()).items():
            self._writers[other] = writer
            self._receivers[other] = self.start_task(self._receive(other, reader))
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        found = self._failure or error
        if isinstance(found, Exception) and not (self.leaving and isinstance(found, RankGone)):
            await self.end_all(self._worded(found))
        self.leaving = True
        await cancel(*self._tasks)
        for writer in self._writers.values():
            writer.close()
        for writer in self._writers.values():
            with suppress(OSError):
                await writer.wait_closed()

    @property
    def _failure(self) -> BaseException | None:
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
        """True if this rank reports `reason` to the run. Valid once all is over."""
        return bool(self.reason) and not self._reported and self.rank == min(self._left)

    async def end(self, why: str) -> None:
        """Make all ranks end for this reason, this rank's exchange and every waiter here included."""
        self._break(RankGone(why))
        await asyncio.sleep(INFORM_S + REPORT_S)

    async def end_all(self, why: str, reported: bool = False) -> None:
        """Make all other ranks end, for this reason unless there is one already; this one is about to.

        reported: this rank reports it to the run itself.
        """
        self.reason = self.reason or why
        self._reported |= reported
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        with suppress(TimeoutError):
            async with asyncio.timeout(INFORM_S):
                await asyncio.gather(*map(self._inform, others), return_exceptions=True)

    async def _inform(self, rank: int) -> None:
        await self.ask(rank, "broken", self.reason, self._reported)
        self._left.add(rank)

    async def _take_broken(self, rank: int, why: str, reported: bool) -> None:
        self._left.add(rank)
        self._reported |= reported
        self.reason = self.reason or why
        self._break(RankGone(self.reason))

    async def cause(self, within_s: float) -> str:
        """Return the reason for which all ranks end if it becomes known within `within_s` seconds, otherwise ""."""
        with suppress(TimeoutError, DilocoError):
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._broken)
        return self.reason or ("" if self._failure is None else self._worded(self._failure))

    async def watch(self) -> None:
        """Wait until a rank is gone; never returns normally.

        Raises:
            RankGone: names the rank.
            DilocoError: a handler or task whose result is not awaited has failed.
        """
        await self._broken

    async def wait_disconnected(self, rank: int) -> None:
        """Wait for the connection to another rank to end. If it ends too early, `watch` raises as well."""
        await asyncio.wait({self._receivers[rank]})

    async def ask(self, rank: int, what: str, *args: Any, vector: Float32 | None = None) -> Any:
        """Send a request to a rank and return its answer. vector: of at most `SLICE` elements.

        Raises:
            UsageError, BusError: the handler there raised it.
            RankGone: the rank is gone.
        """
        if rank == self.rank:
            return await self._handlers[what](rank, *args, *([] if vector is None else [vector]))
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = rank, answer
        try:
            await self._write(rank, [number, what, *args], vector)
            return await answer
        finally:
            self._asked.pop(number, None)

    async def ask_all(self, what: str, *args: Any) -> list[Any]:
        """Send a request to all ranks, this one too; return their answers by rank. Raises what `ask` does."""
        return await asyncio.gather(*(self.ask(rank, what, *args) for rank in range(self.ranks)))

    def notify(self, rank: int, what: str, *args: Any) -> None:
        """Send a request to a rank without waiting for an answer."""
        self.start_task(self.ask(rank, what, *args))

    def start_task(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a task; if it fails, this rank's learner is broken (`watch` raises)."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    # --- inside -------------------------------------------------------------------------------------------

    def _task_ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._broken.done() and not self.leaving:
            self._broken.set_exception(error)

    async def _write(self, rank: int, head: list[Any], vector: Float32 | None = None) -> None:
        packed: bytes = msgpack.packb([vector is not None, *head])
        data = memoryview(b"") if vector is None else as_bytes(vector)
        try:
            if (writer := self._writers.get(rank)) is None:
                raise ConnectionError("it is no longer connected")
            # Without an `await` in between, so that a message is contiguous, and whole even if the caller is cancelled.
            writer.write(_SIZES.pack(len(packed), len(data)) + packed)
            writer.write(data)
            await writer.drain()
        except OSError as error:
            raise self._gone(rank, error) from error

    def _gone(self, rank: int, error: BaseException) -> RankGone:
        if self.reason:
            return RankGone(self.reason)
        how = "has ended" if isinstance(error, (OSError, EOFError)) else f"sent unreadable data ({error})"
        return RankGone(f"rank {rank} of this learner {how}, so the learner ends too: start all of its ranks again")

    async def _receive(self, rank: int, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size, nbytes = _SIZES.unpack(await reader.readexactly(_SIZES.size))
                if size > MAX_HEAD_BYTES or nbytes > 4 * SLICE or nbytes % 4:
                    raise ValueError(f"a head of {size} and a vector of {nbytes} bytes cannot have come from a rank")
                has_vector, number, what, *args = msgpack.unpackb(await reader.readexactly(size))
                if has_vector:
                    args.append(pooled(nbytes // 4, np.float32))
                    as_bytes(args[-1])[:] = await reader.readexactly(nbytes)
                self._dispatch(rank, number, what, args)
        except (OSError, EOFError, ValueError, TypeError) as error:
            gone = self._gone(rank, error)
            self._break(gone)
            self._writers.pop(rank).close()  # later requests to this rank fail at once
            for of, answer in self._asked.values():
                if of == rank and not answer.done():
                    answer.set_exception(gone)
                    answer.exception()

    def _dispatch(self, rank: int, number: int, what: str | None, args: list[Any]) -> None:
        # Tasks start in the order of their creation, so a rank's requests are begun in the order in which it sent them.
        if what is not None:
            if what not in self._handlers:
                raise ValueError(f"{what!r:.40} is not a known request")
            self.start_task(self._answer(rank, number, what, args))
        elif number in self._asked and not (answer := self._asked[number][1]).done():
            kind, result = args
            if kind is None:
                answer.set_result(result)
            elif kind in KINDS:
                answer.set_exception(KINDS[kind](result))
            else:
                raise ValueError(f"{kind!r:.40} is not a known kind of error")

    async def _answer(self, rank: int, number: int, what: str, args: list[Any]) -> None:
        kind = result = None
        try:
            result = await self._handlers[what](rank, *args)
        except RankGone:
            raise
        except DilocoError as error:
            if not isinstance(error, BusError):  # an outage is logged by the rank that retries
                structlog.get_logger().error("rank_failed", rank=self.rank, doing=what, error=str(error))
            kind = next((one.__name__ for one in type(error).__mro__ if one.__name__ in KINDS), UsageError.__name__)
            result = str(error)
        await self._write(rank, [number, None, kind, result])
