"""Messages between the exchange threads of a learner's ranks: each rank has a connection to each other. asyncio.

A message has a head (msgpack: the kind of request and its number) and may carry a vector's bytes. Each request gets one
answer. A rank begins to work on another rank's requests in the order in which they were sent.

A rank whose process is killed is noticed at once, because the kernel closes its connections; a rank whose machine is
unreachable is noticed after `lines.SILENT_S`. Either breaks this rank's learner: `watch` raises. The rank that finds
out tells all others why before its own connections close; otherwise they would take it for the cause. It also names the
rank that reports to the run (on the bus), which is the lowest rank that is left. That speaker tells all other ranks
too, so that they know it is alive; a rank that cannot reach the speaker reports to the run itself.
"""

import asyncio
import itertools
import struct
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Self, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt
import structlog

from diloco.pipeline.errors import BusError, BusFull, BusUnavailable, DilocoError, RankGone, UsageError
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import as_bytes
from diloco.workers.ranks.lines import Lines, Writer

Float32 = npt.NDArray[np.float32]
T = TypeVar("T")
# Called with the rank that asks, then the request's arguments, a vector last. It must return what msgpack can encode.
Handler = Callable[..., Awaitable[Any]]

# Bytes written or read at a time.
SLICE_BYTES = 2**20
MAX_HEAD_BYTES = 16 * 2**20
# Seconds that the other ranks get to hear why this rank ends (`TOLD_S`), and that a report to the bus may take
# (`SAID_S`).
TOLD_S, SAID_S = 5.0, 2.0
# The kinds of error that travel to the asking rank; every other one travels as UsageError. The asking rank retries
# after those of the bus.
KINDS = {kind.__name__: kind for kind in (UsageError, BusError, BusUnavailable, BusFull)}
_SIZES = struct.Struct("<IQ")


class Wires:
    """One rank's connections. Use it in `async with`: nothing is connected before."""

    def __init__(self, lines: Lines, most: int) -> None:
        """most: largest number of elements in a vector."""
        self.rank, self.ranks = lines.rank, lines.ranks
        self._lines, self._most = lines, most
        self._handlers: dict[str, Handler] = {"torn": self._take_torn}
        self._writers: dict[int, Writer] = {}
        self._locks = [asyncio.Lock() for _ in range(lines.ranks)]
        self._questions = itertools.count()
        self._asked: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        """Maps the number of a request to the rank that was asked and to its answer."""
        self._tasks = set[asyncio.Task[Any]]()
        self._hearing: dict[int, asyncio.Task[None]] = {}
        """Maps a rank to the task that reads from it until the connection ends."""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.leaving = False
        """True once the ranks leave: connections that end are then no error."""
        self.why = ""
        """The reason for which all ranks end, once a rank has given one. Connections that end then have it too."""
        self._gone_ones = set[int]()
        self._heard_by = {self.rank}
        """Ranks that know the reason."""
        self._speaker = -1
        """The rank that reports to the run; -1 until it is known."""

    def handle(self, **handlers: Handler) -> None:
        """Register handlers for requests, by kind."""
        self._handlers |= handlers

    async def __aenter__(self) -> Self:
        """Connect to all other ranks. Requests are answered from now on: call `handle` before.

        Raises:
            RankGone: a rank does not answer in time.
        """
        for other, (reader, writer) in (await self._lines.connect()).items():
            self._writers[other] = writer
            self._hearing[other] = self.go_on(self._hear(other, reader))
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        found = self._found or error
        if not self.why and isinstance(found, Exception) and not (self.leaving and isinstance(found, RankGone)):
            await self.tell_all(self._worded(found))
        elif self.speaks:
            await self.tell_all(self.why)
        self.leaving = True
        self._lines.close()
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
    def speaks(self) -> bool:
        """True if this rank is the one that reports `why` to the run. Valid once all is over."""
        return self._speaker == self.rank

    async def end(self, why: str) -> None:
        """Make all ranks end for this reason, this rank's exchange and every waiter here included."""
        self._break(RankGone(why))
        await asyncio.sleep(TOLD_S + SAID_S)

    async def tell_all(self, why: str, said: bool = False) -> None:
        """Make all other ranks end for this reason; this one is about to. said: it reports to the run itself."""
        self.why = why
        speaker = self.rank if said or self.speaks else min({*range(self.ranks)} - self._gone_ones)
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        with suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                await asyncio.gather(*(self._tell(rank, speaker) for rank in others), return_exceptions=True)
        if not said:
            self._speaker = speaker if speaker in self._heard_by else self.rank

    async def _tell(self, rank: int, speaker: int) -> None:
        await self.ask(rank, "torn", self.why, speaker)
        self._heard_by.add(rank)

    async def cause(self, within_s: float) -> str:
        """Return the reason for which all ranks end if it becomes known within `within_s` seconds, else ""."""
        with suppress(TimeoutError, DilocoError):
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._broken)
        found = self._found
        return self.why or ("" if found is None else self._worded(found))

    async def watch(self) -> None:
        """Wait until a rank is gone; never returns normally.

        Raises:
            RankGone: names the rank.
            DilocoError: a handler or task whose result nobody awaits has failed.
        """
        await self._broken

    async def until_gone(self, rank: int) -> None:
        """Wait for the connection to another rank to end. If it ends too early, `watch` raises as well."""
        await asyncio.wait({self._hearing[rank]})

    async def ask(self, rank: int, what: str, *said: Any, vector: Float32 | None = None) -> Any:
        """Send a request to a rank and return its answer.

        Raises:
            UsageError, BusError: the handler there raised it.
            RankGone: the rank is gone.
        """
        if rank == self.rank:
            return await self._handlers[what](rank, *said, *([] if vector is None else [vector]))
        number, answer = next(self._questions), asyncio.get_running_loop().create_future()
        self._asked[number] = rank, answer
        try:
            # Shielded: a message must be written to its end even if the caller is cancelled, since the receiver would
            # read the next message as the rest of this one.
            await asyncio.shield(self.go_on(self._write(rank, [number, what, *said], vector)))
            return await answer
        finally:
            self._asked.pop(number, None)

    def tell(self, rank: int, what: str, *said: Any) -> None:
        """Send a request to a rank without waiting for an answer."""
        self.go_on(self.ask(rank, what, *said))

    # --- inside -------------------------------------------------------------------------------------------

    def go_on(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
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

    async def _take_torn(self, rank: int, why: str, speaker: int) -> None:
        self._heard_by.add(rank)
        if not self.why:
            self.why, self._speaker = why, speaker
        self._break(RankGone(self.why))

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
        self._gone_ones.add(rank)
        if self.why:
            return RankGone(self.why)
        how = "is gone" if isinstance(error, (OSError, EOFError)) else f"sent unreadable data ({error}): it is gone"
        return RankGone(f"rank {rank} of this learner {how}, and the learner with it: start all of its ranks again")

    async def _hear(self, rank: int, reader: asyncio.StreamReader) -> None:
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
                self._take(rank, number, what, said)
        except (OSError, asyncio.IncompleteReadError, ValueError, TypeError) as error:
            gone = self._gone(rank, error)
            self._break(gone)
            self._writers.pop(rank).close()  # later requests to this rank fail at once
            for of, answer in self._asked.values():
                if of == rank and not answer.done():
                    answer.set_exception(gone)
                    answer.exception()

    def _take(self, rank: int, number: int, what: str | None, said: list[Any]) -> None:
        # Tasks start in the order of their creation, so a rank's requests are begun in the order in which it sent them.
        if what is not None:
            self.go_on(self._answer(rank, number, what, said))
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
