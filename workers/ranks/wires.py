"""Connections between the exchange threads of a learner's ranks: each has one to each other. asyncio.

A message has a head (msgpack: what is asked, of which question) and may have a vector's bytes. Whoever asks gets one
answer. What one rank asks another is begun there in the order in which it was asked.

A rank whose process is killed is noticed at once, since the system closes its connections; one whose machine is gone,
after `lines.SILENT_S`. Then this rank's learner is broken: `watch` raises. Whoever finds out tells all others why
before its own connections close: else they would take it for the cause. With that it says who tells the run: the first
rank that is left. That one tells all others too, so that they know it lives; who cannot reach it tells the run itself.
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
Handler = Callable[..., Awaitable[Any]]
"""Called with the rank that asks, then what it says; a vector comes last. What it returns must be msgpack's."""

SLICE_BYTES = 2**20
"""Written and read at a time."""
MAX_HEAD_BYTES = 16 * 2**20
TOLD_S, SAID_S = 5.0, 2.0
"""For the others to hear why this rank ends; for the bus."""
KINDS = {kind.__name__: kind for kind in (UsageError, BusError, BusUnavailable, BusFull)}
"""Of errors as they are told; all others are told as the first. After those of the bus it is tried again."""
_SIZES = struct.Struct("<IQ")


class Wires:
    """One rank's. Use in `async with`: until then nothing is connected."""

    def __init__(self, lines: Lines, most: int) -> None:
        """most: elements that a vector has."""
        self.rank, self.ranks = lines.rank, lines.ranks
        self._lines, self._most = lines, most
        self._handlers: dict[str, Handler] = {"torn": self._take_torn}
        self._writers: dict[int, Writer] = {}
        self._locks = [asyncio.Lock() for _ in range(lines.ranks)]
        self._questions = itertools.count()
        self._asked: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        """Question -> the rank that was asked, and its answer."""
        self._tasks = set[asyncio.Task[Any]]()
        self._hearing: dict[int, asyncio.Task[None]] = {}
        """Rank -> what hears it, until its connection ends."""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.leaving = False
        """From now on the others may go."""
        self.why = ""
        """What all ranks end by, once one has told: their connections end then too."""
        self._gone_ones = set[int]()
        self._heard_by = {self.rank}
        """Ranks that know why."""
        self._speaker = -1
        """Rank that tells the run."""

    def handle(self, **handlers: Handler) -> None:
        """What is done when it is asked here."""
        self._handlers |= handlers

    async def __aenter__(self) -> Self:
        """Connect to all. What they ask is done from now on: their questions must be known (`handle`) before.

        Raises:
            RankGone: one does not answer in time.
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
        """What this rank is broken by."""
        if not self._broken.done() or self._broken.cancelled():  # as its watcher was, by an error from elsewhere
            return None
        return self._broken.exception()  # it was told, or nobody was there to be told

    def _worded(self, error: BaseException) -> str:
        if isinstance(error, RankGone):
            return str(error)
        how = f"{error!s:.400}" if isinstance(error, DilocoError) else f"{error!r:.400}"
        return f"rank {self.rank} of this learner has ended: {how}"

    @property
    def speaks(self) -> bool:
        """Once all is over: it is this rank that tells the run `why`."""
        return self._speaker == self.rank

    async def end(self, why: str) -> None:
        """Have all ranks end by this, this one's exchange too, and with it whoever waits here."""
        self._break(RankGone(why))
        await asyncio.sleep(TOLD_S + SAID_S)

    async def tell_all(self, why: str, said: bool = False) -> None:
        """Have all other ranks end by this; this one is about to. said: it has told the run, or does."""
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
        """What all ranks end by, or will, if that turns out within some time; else nothing."""
        with suppress(TimeoutError, DilocoError):
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._broken)
        found = self._found
        return self.why or ("" if found is None else self._worded(found))

    async def watch(self) -> None:
        """Until a rank is gone.

        Raises:
            RankGone: naming it.
            DilocoError: what a handler that nobody waits for has failed by.
        """
        await self._broken

    async def until_gone(self, rank: int) -> None:
        """Wait for the end of the connection to another rank; if it came too early, `watch` raises too."""
        await asyncio.wait({self._hearing[rank]})

    async def ask(self, rank: int, what: str, *said: Any, vector: Float32 | None = None) -> Any:
        """Have a rank do something; its answer.

        Raises:
            UsageError, BusError: as it did there.
            RankGone: it is gone.
        """
        if rank == self.rank:
            return await self._handlers[what](rank, *said, *([] if vector is None else [vector]))
        number, answer = next(self._questions), asyncio.get_running_loop().create_future()
        self._asked[number] = rank, answer
        try:
            # Cancelled or not, what was begun is written to its end: else the next message is read as its rest.
            await asyncio.shield(self.go_on(self._write(rank, [number, what, *said], vector)))
            return await answer
        finally:
            self._asked.pop(number, None)

    def tell(self, rank: int, what: str, *said: Any) -> None:
        """Have a rank do something, and wait for nothing."""
        self.go_on(self.ask(rank, what, *said))

    # --- inside -------------------------------------------------------------------------------------------

    def go_on(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin a task; if it fails, all is broken."""
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
                    raise ConnectionError("it is connected no more")
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
        how = "is gone" if isinstance(error, (OSError, EOFError)) else f"says what cannot be read ({error}): it is gone"
        return RankGone(f"rank {rank} of this learner {how}, and the learner with it: start all of its ranks again")

    async def _hear(self, rank: int, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size, nbytes = _SIZES.unpack(await reader.readexactly(_SIZES.size))
                if size > MAX_HEAD_BYTES or nbytes > 4 * self._most or nbytes % 4:
                    raise ValueError(f"a head of {size} and a vector of {nbytes} bytes are none of a rank's")
                has_vector, number, what, *said = msgpack.unpackb(await reader.readexactly(size))
                if what is not None and what not in self._handlers:
                    raise ValueError(f"{what!r:.40} is nothing that is asked")
                if has_vector:
                    said.append(await _read_vector(reader, nbytes))
                self._take(rank, number, what, said)
        except (OSError, asyncio.IncompleteReadError, ValueError, TypeError) as error:
            gone = self._gone(rank, error)
            self._break(gone)
            self._writers.pop(rank).close()  # whoever asks it from now on is told at once
            for of, answer in self._asked.values():
                if of == rank and not answer.done():
                    answer.set_exception(gone)
                    answer.exception()

    def _take(self, rank: int, number: int, what: str | None, said: list[Any]) -> None:
        if what is not None:
            self.go_on(self._answer(rank, number, what, said))
        elif number in self._asked and not (answer := self._asked[number][1]).done():
            kind, found = said
            if kind is None:
                answer.set_result(found)
            elif kind in KINDS:
                answer.set_exception(KINDS[kind](found))
            else:
                raise ValueError(f"{kind!r:.40} is no kind of error")

    async def _answer(self, rank: int, number: int, what: str, said: list[Any]) -> None:
        kind = found = None
        try:
            found = await self._handlers[what](rank, *said)
        except RankGone:
            raise
        except DilocoError as error:
            if not isinstance(error, BusError):  # an outage is told where it is tried again
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
