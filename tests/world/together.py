"""What lies between the ranks of a simulated learner: connections, gradients and sums, in virtual time. asyncio.

Stand-ins for the streams of `workers.ranks.transport` and for `step_agreement.Collectives`. Bytes between two ranks
arrive in order, after drawn times; with either's death the connection ends a little later. Gradients of a
step are there once all ranks have come to it, a sum once all have put in their numbers. Where a rank is dead they never
are: whoever waits is told soon in some lives (gloo), and in the others only by what its own exchange finds out (NCCL).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import RankGone
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.wire import AVERAGED
from diloco.workers.ranks.placement import Block, Shares, row_of, whole_block
from diloco.workers.ranks.step_agreement import DataPlace
from diloco_studies.virtual.chance import Chance

BREAKS_S = 0.3
"""A connection ends at most so long after a process on it was killed."""
STARTS_S = 0.3
"""The ranks of a learner start within this."""
WAKES_S = 0.003
"""An exchange thread does what it is told within this."""


class Crew:
    """One life of a learner of several ranks."""

    def __init__(self, chance: Chance, layout: Layout, name: str, life: int, ranks: int, latency_s: float) -> None:
        self.chance, self.layout, self.name, self.life, self.ranks = chance, layout, name, life, ranks
        self.latency_s = latency_s
        self.replicated = chance.share("replicated", name, life) < 0.4
        self.held = [self._held(rank) for rank in range(ranks)]
        self.shares = Shares(layout, self.held)
        self.indices = [[self._indices(rank, p) for p in range(len(layout.fragments))] for rank in range(ranks)]
        """By rank and fragment: where its own vector lies in the fragment's (elements,)."""
        self.tells = chance.share("tells", name, life) < 0.5
        """Those who wait for a dead rank's gradients are told so."""
        self.struck = False
        """A rank of it was killed."""
        self.slow_until = 0.0
        """Its connections are slow."""
        self.ends: list[Any] = []
        """Its ranks."""
        self.meetings = [Meeting(self, rank) for rank in range(ranks)]
        self._here = [asyncio.get_running_loop().create_future() for _ in range(ranks)]
        self._pipes: dict[tuple[int, int], Pipe] = {}
        self._gathered: dict[tuple[str, int], dict[int, Sequence[int]]] = {}
        self._results: dict[tuple[str, int], asyncio.Future[list[int]]] = {}
        self._decisions: set[int] = set()
        """Sums with snapshots or adoptions."""

    # --- who holds what -------------------------------------------------------------------------------------

    def _held(self, rank: int) -> dict[str, Block]:
        """Blocks of each tensor: all, or rows or columns between cuts that leave some ranks nothing."""
        found: dict[str, Block] = {}
        for tensor in {slot.tensor.name: slot.tensor.whole for f in self.layout.fragments for slot in f.slots}.values():
            found[tensor.name] = whole = whole_block(tensor)
            if not self.replicated and tensor.rule not in AVERAGED:
                columns = self.chance.share("columns", self.name, self.life, tensor.name) < 0.3
                most = whole.right if columns else whole.last
                drawn = (self.chance.integer("cut", self.name, self.life, tensor.name, i) for i in range(1, self.ranks))
                cuts = [0, *sorted(one % (most + 1) for one in drawn), most]
                first, last = cuts[rank : rank + 2]
                block = whole._replace(left=first, right=last) if columns else whole._replace(first=first, last=last)
                found[tensor.name] = block if block.elements else Block(0, 0, 0, 0)
        return found

    def _indices(self, rank: int, p: int) -> npt.NDArray[np.int64]:
        found: list[int] = []
        for slot in self.layout.fragments[p].slots:
            held, row, first = self.held[rank][slot.tensor.name], row_of(slot.tensor), slot.within.start
            for e in range(slot.within.start, slot.within.stop):
                if held.first <= e // row < held.last and held.left <= e % row < held.right:
                    found.append(slot.start + e - first)
        return np.array(found, np.int64)

    # --- time -------------------------------------------------------------------------------------------------

    def takes_s(self, *what: object) -> float:
        """How long something is on its way between ranks: mostly less than a call to the bus, at times much longer."""
        now, share = asyncio.get_running_loop().time(), self.chance.share("way", self.name, self.life, *what)
        slow_s = 0.4 * share if now < self.slow_until else 0.0
        return slow_s + self.latency_s * (0.1 + share if share < 0.98 else 5000 * (share - 0.98))

    # --- death --------------------------------------------------------------------------------------------------

    def died(self, rank: int) -> None:
        """A rank was killed: its connections end, and who waits for it may be told."""
        self.struck = True
        loop = asyncio.get_running_loop()
        for (sender, receiver), pipe in self._pipes.items():
            if rank in (sender, receiver):
                loop.call_later(BREAKS_S * self.chance.share("breaks", self.name, self.life, sender), pipe.end)
        for other in range(self.ranks):
            late_s = BREAKS_S * self.chance.share("told", self.name, self.life, other)
            loop.call_later(late_s, self._told_at_start, other)
            if self.tells:
                loop.call_later(late_s, self.meetings[other].abort)

    def _told_at_start(self, rank: int) -> None:
        """Ranks that are still meeting hear at once of one that is gone."""
        if not all(one.done() for one in self._here):
            self._here[rank].cancel()

    async def connected(self, rank: int) -> dict[int, Any]:
        """Wait for all ranks, and connect to them."""
        others = [other for other in range(self.ranks) if other != rank]
        for one, two in [(rank, other) for other in others] + [(other, rank) for other in others]:
            if (one, two) not in self._pipes:
                self._pipes[one, two] = Pipe(self, self.ends[one], self.ends[two])
        if not self._here[rank].done():
            self._here[rank].set_result(None)
        await asyncio.sleep(self.takes_s("connect", rank))
        for other in others:
            await asyncio.wait({self._here[other]})
        if self.struck and any(one.cancelled() for one in self._here):
            raise RankGone(f"rank {rank} of this learner cannot reach all others")
        return {other: (self._pipes[other, rank].reader, self._pipes[rank, other]) for other in others}

    def close(self, rank: int) -> None:
        """A rank is connected no more."""
        if not self._here[rank].done():
            self._here[rank].cancel()

    # --- what all ranks give, and get ---------------------------------------------------------------------------

    def gather(self, rank: int, what: str, number: int, given: Sequence[int]) -> "asyncio.Future[list[int]]":
        """Put in this rank's; the sum over all ranks is there a while after the last one has put in its own."""
        loop, key = asyncio.get_running_loop(), (what, number)
        result = self._results.setdefault(key, loop.create_future())
        gathered = self._gathered.setdefault(key, {})
        gathered[rank] = given
        if rank == 0 and any(given[4:]):
            self._decisions.add(number)
        if len(gathered) == self.ranks:
            del self._gathered[key]
            sums = [sum(column) for column in zip(*gathered.values(), strict=True)]
            loop.call_later(self.takes_s(*key), lambda: result.done() or result.set_result(sums))
        return result

    def decided(self, number: int) -> bool:
        """Whether rank 0 has decided something in this sum or the one before: then it is about to be done."""
        return number in self._decisions or number - 1 in self._decisions


class Meeting:
    """`step_agreement.Collectives` of one rank."""

    def __init__(self, crew: Crew, rank: int) -> None:
        self.rank, self.place, self._crew = rank, DataPlace(rank, crew.ranks, rank), crew
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sums: list[WorldSum] = []

    def start_sum(self, numbers: Sequence[int]) -> "WorldSum":
        number = len(self._sums)
        self._sums.append(WorldSum(self._crew.gather(self.rank, "sum", number, tuple(numbers))))
        return self._sums[-1]

    def abort(self) -> None:
        """Whoever waits here, or will, hears that a rank is gone."""
        if not self._aborted.done():
            self._aborted.set_result(None)

    async def gradients(self, step: int) -> None:
        """Wait until all ranks have those of a step.

        Raises:
            RankGone: one never will.
        """
        await self._until(self._crew.gather(self.rank, "gradients", step, ()))

    async def sums(self, count: int) -> None:
        """Wait for the first ones."""
        for one in self._sums[max(0, count - 3) : max(0, count)]:
            await self._until(one.result)

    async def _until(self, result: "asyncio.Future[list[int]]") -> None:
        if not result.done():
            await asyncio.wait({result, self._aborted}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise RankGone("a rank of this learner has ended, so the learner ends too")


class WorldSum:
    """`step_agreement.Sum`; whoever reads it has waited for it."""

    def __init__(self, result: "asyncio.Future[list[int]]") -> None:
        self.result = result

    @property
    def done(self) -> bool:
        return self.result.done()

    def wait(self, within_s: float | None = None) -> list[int]:
        return self.result.result()


class Pipe:
    """From one rank to another: a writer there, a stream here."""

    def __init__(self, crew: Crew, sender: Any, receiver: Any) -> None:
        self._crew, self._sender, self._receiver = crew, sender, receiver
        self.reader = asyncio.StreamReader()
        self._arrived: deque[bytes | None] = deque()
        """None: the end."""
        self._at_s = 0.0
        self._sent = 0
        self._closed = False

    def write(self, data: bytes | memoryview) -> None:
        if not (self._closed or self._sender.link.dead):
            self._send(bytes(data))

    async def drain(self) -> None:
        if self._closed or not self._receiver.alive:
            raise ConnectionResetError("nobody reads this any more")

    def close(self) -> None:
        if not self._sender.link.dead:
            self.end()

    async def wait_closed(self) -> None:
        """As `asyncio.StreamWriter`."""

    def end(self) -> None:
        """Nothing more comes."""
        if not self._closed:
            self._closed = True
            self._send(None)

    def _send(self, data: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        self._sent += 1
        way_s = self._crew.takes_s(self._sender.rank, self._receiver.rank, self._sent)
        self._at_s = max(self._at_s, loop.time(), self._sender.link.paused_until * (data is not None)) + way_s
        loop.call_at(self._at_s, self._arrive, data)

    def _arrive(self, data: bytes | None) -> None:
        self._arrived.append(data)
        self._read()

    def _read(self) -> None:
        """One that is paused reads it later."""
        loop, link = asyncio.get_running_loop(), self._receiver.link
        if link.dead:
            return
        if link.paused_until > loop.time():
            loop.call_at(link.paused_until, self._read)
            return
        while self._arrived:
            data = self._arrived.popleft()
            if data is None:
                self.reader.feed_eof()
            elif data:
                self.reader.feed_data(data)


class Thread:
    """A rank's exchange thread as its training thread knows it: what it is told it does in order, a little later."""

    def __init__(self, crew: Crew, end: Any, failed: Callable[[Exception], None]) -> None:
        self._crew, self._end, self._failed = crew, end, failed
        self._told: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._calls = 0
        self.stopped = False
        """It has ended, and does no more."""
        self.tasks: set[asyncio.Task[Any]] = set()

    def call(self, what: Callable[..., Any], *args: Any) -> None:
        self._calls += 1
        self._told.append((what, args))
        late_s = WAKES_S * self._crew.chance.share("wakes", self._crew.name, self._end.rank, self._calls)
        asyncio.get_running_loop().call_later(late_s, self._do)

    def ask(self, work: Any) -> "asyncio.Future[Any]":
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def answered() -> None:
            try:
                answer.set_result(await work)
            except Exception as error:  # it is who waits that is told
                answer.set_exception(error)

        def begin() -> None:
            self.tasks.add(task := asyncio.create_task(answered()))
            task.add_done_callback(self.tasks.discard)

        self.call(begin)
        return answer

    def left_in_order(self, leaving: "asyncio.Future[Any]") -> "asyncio.Future[Any]":
        """Where a thread would wait for another one, it hands on what to wait for."""
        return leaving

    def _do(self) -> None:
        loop, link = asyncio.get_running_loop(), self._end.link
        if link.dead or self.stopped:
            return
        if link.paused_until > loop.time():
            loop.call_at(link.paused_until, self._do)
            return
        while self._told:
            what, args = self._told.popleft()
            try:
                what(*args)
            except Exception as error:  # asyncio would log it, and go on
                self._failed(error)
