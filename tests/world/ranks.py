"""One rank of a simulated learner: the production code of ranks, with toy training of what it holds. asyncio.

Its training coroutine sleeps for its steps, and waits for the gradients of the other ranks and for the sums that they
agree by: never for the bus. Its exchange runs beside it, over a connection of its own to the bus.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import RankGone
from diloco.pipeline.messages.run import LearnerReport, RunState
from diloco.pipeline.messages.wire import AVERAGED
from diloco.workers.moments.recovery import FoundMoments
from diloco.workers.ranks.rank_exchange import RankExchange
from diloco.workers.ranks.rank_learner import JoinedRank, Rank
from diloco.workers.ranks.transport import Transport
from diloco.workers.rounds import Base, OpenWindow, Publication, Rounds
from diloco.workers.stopping import STOPS, Stopping
from diloco_studies.virtual.virtual_time import inline
from tests.samples import virtual_report
from tests.world.alike import Alike
from tests.world.parties import INITIAL, LEARNING_RATE, LEAVE_S, TARGETS, Party
from tests.world.together import STARTS_S, Crew, Thread

Float32 = npt.NDArray[np.float32]


class WatchedRounds(Rounds):
    """Rank 0's: tells what it counts."""

    alike: Alike
    counted_steps = 0

    def trained(self, tokens: int) -> None:
        super().trained(tokens)
        self.counted_steps += 1

    def adopt(self, base: Base) -> None:
        super().adopt(base)
        self.alike.counted(base)

    def publication(self, p: int, windows: Mapping[int, OpenWindow]) -> Publication:
        made = super().publication(p, windows)
        self.alike.made(made, self.counted_steps)
        return made


class Joined(JoinedRank):
    """What it publishes is looked at."""

    party: "WorldRank"

    def _queue(self, items: Iterable[tuple[Publication, Any]], adopted: bool) -> None:
        for publication, tag in items:
            self.party.alike.published(publication, tag, self.party.final)
        super()._queue(items, adopted)


class WorldTransport(Transport):
    """A rank can be killed or paused before and after each of its questions."""

    party: "WorldRank"

    async def ask(self, rank: int, what: str, *said: Any, vector: Any = None) -> Any:
        self.party.crash_point(f"ask_{what}", False)
        found = await super().ask(rank, what, *said, vector=vector)
        self.party.crash_point(f"ask_{what}", True)
        return found


class Parameters:
    """What a rank holds of the model: `workers.parameters.FragmentParameters` of a toy."""

    def __init__(self, party: "WorldRank") -> None:
        self._party = party

    def overwrite(self, p: int, values: Float32) -> None:
        """A global is adopted."""
        party = self._party
        party.alike.overwrote(party.rank, party.step, p, values)
        party.values[p][:] = values

    def snapshot(self, p: int) -> Any:
        """As it is now; poisoned now and then, while it is trained."""
        party = self._party
        taken = party.values[p].copy()
        if party.trains and not party.training_idle:
            whose = party.learner if party.crew.replicated else party.name  # replicas stay alike
            if len(taken) and party.world.poisons((p, whose, party.incarnation, party.step)):
                taken[0] = np.nan
            party.alike.snapshot(party.rank, party.step, p, taken.copy())
        return SimpleNamespace(numpy=lambda: taken)


class Recovery:
    """Moments are no part of a world: at most it is said that there are some."""

    def __init__(self, party: "WorldRank") -> None:
        self._party = party

    async def find(self, peers: Any, versions: tuple[int, ...], state: RunState | None) -> FoundMoments:
        await asyncio.sleep(self._party.crew.takes_s("recover", self._party.rank))
        return FoundMoments("start" if max(versions) == 0 else "fresh")


class WorldRank(Party):
    """One rank of one incarnation of a learner."""

    def __init__(self, world: Any, number: int, crew: Crew, rank: int, alike: Alike, incarnation: str) -> None:
        plan, self.learner = world.plan, crew.name
        skew_s = plan.skew_s[(number + rank) % len(plan.skew_s)]
        super().__init__(world, crew.name if rank == 0 else f"{crew.name}.{rank}", crew.life, skew_s)
        self.unit = crew.name
        self.crew, self.rank, self.alike, self.incarnation = crew, rank, alike, incarnation
        crew.ends.append(self)
        self.step_s = plan.step_s[number % plan.learners]
        self.step_tokens = plan.step_tokens[number % plan.learners] + 3 * rank
        self.step = 0
        self.trains = False
        self.lags_until = self.stopped_until = 0.0
        """The training thread lags; the process is paused."""
        self.left: bool | None = None
        self.values = [np.full(len(one), INITIAL, np.float32) for one in crew.indices[rank]]
        self._own = [self._own_noise(p) for p in range(len(self.values))]
        self.rounds = WatchedRounds(world.layout, world.spec.sync)
        self.rounds.alike = alike
        self._stopping = Stopping()
        self._stopping.together = True
        self._joined: Future[tuple[Any, FoundMoments]] = Future()
        self._thread = Thread(crew, self, self._failed)

    def _own_noise(self, p: int) -> Float32:
        """What a rank's buffers differ by from another's."""
        slots = self.world.layout.fragments[p].slots
        averaged = np.concatenate([np.full(slot.stop - slot.start, slot.tensor.rule in AVERAGED) for slot in slots])
        own: Float32 = (0.01 * self.rank * averaged[self.crew.indices[self.rank][p]]).astype(np.float32)
        return own

    def report(self, left: bool) -> LearnerReport:
        """What it says about its learner."""
        return virtual_report(self.rounds, self.learner, self.incarnation, self.step_s, left)

    @property
    def training_idle(self) -> bool:
        """It waits, as it leaves: its last values are asked for."""
        return bool(self._joined.result()[0].transfers.training_idle.is_set())

    def final(self, p: int) -> dict[int, Float32]:
        """What all ranks have of a fragment."""
        ends: Any = self.crew.ends
        return {end.rank: end.values[p].copy() for end in ends}

    # --- what strikes it ------------------------------------------------------------------------------------

    def kill(self) -> None:
        """As SIGKILL."""
        if not self.link.dead:
            super().kill()
            self.crew.died(self.rank)

    def pause(self, lasts_s: float) -> None:
        """As SIGSTOP for a while."""
        super().pause(lasts_s)
        self.stopped_until = self.link.paused_until

    def leave(self) -> None:
        """As SIGTERM."""
        self._stopping.heard = STOPS[0]

    async def paused(self) -> None:
        """Wait until its training thread goes on."""
        loop = asyncio.get_running_loop()
        while (left_s := max(self.lags_until, self.stopped_until) - loop.time()) > 0:
            await asyncio.sleep(left_s)

    def crash_point(self, what: str, after: bool) -> None:
        """It may be killed or paused here."""
        self.world.crash_point(self.link, what, after)

    def _failed(self, error: Exception) -> None:
        self.world.oracle.broken("an exchange does what it is told", f"{self.name}: {error!r}")

    # --- its life -------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Meet the others, join, train until all leave, leave.

        Raises:
            RankGone: another rank is gone.
        """
        await asyncio.sleep(STARTS_S * self.world.chance.share("starts", self.name, self.life))
        exchange = asyncio.create_task(self._exchange())
        exchange.add_done_callback(lambda _: self.crew.meetings[self.rank].abort())
        try:
            await self._train_and_leave(exchange)
        finally:
            self._thread.stopped = True
            for task in [exchange, *self._thread.tasks]:
                task.cancel()
            with suppress(asyncio.CancelledError, RankGone):
                await exchange
            self.crew.close(self.rank)
        self.alive = False

    async def _exchange(self) -> None:
        transport = WorldTransport(self.rank, self.crew.ranks, partial(self.crew.connected, self.rank))
        transport.party = self
        given: Any = self.link, self.clock, transport, self._training(), self.crew.shares, self._joined
        await RankExchange(*given, abandoned=lambda: False, offload=inline).work()

    def _training(self) -> Any:
        world = self.world
        return SimpleNamespace(
            learner=self.learner,
            incarnation=self.incarnation,
            spec=world.spec,
            layout=world.layout,
            rounds=self.rounds,
            parameters=Parameters(self),
            recovery=Recovery(self),
            keeper=SimpleNamespace(close=lambda shared, save_state, within_s: None),
            report=self.report,
        )

    async def _train_and_leave(self, exchange: "asyncio.Task[None]") -> None:
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._joined.add_done_callback(lambda _: entered.done() or entered.set_result(None))
        await self._or_failed(entered, exchange)
        rank: Rank = self._joined.result()[0]
        meeting: Any = self.crew.meetings[self.rank]
        thread: Any = self._thread
        joined = Joined(self._training(), rank, thread, meeting, self.crew.shares, self._stopping)
        joined.party = self
        joined.hand_over((), joined.adopt())
        self.trains = True
        while not (self._stopping.asked or joined.over):
            if exchange.done():
                exchange.result()
            await self._train(self.step + 1)
            await meeting.gradients(self.step + 1)
            self.step += 1
            tokens = 0 if self.rank and self.step % 5 == 0 else self.step_tokens
            self.alike.trained(self.rank, self.step, tokens, self.values)
            await meeting.sums(self.step - 1)
            if self.crew.decided(self.step - 1):
                self.crash_point("decided", False)
                if self.link.dead:
                    return
            joined.stepped(tokens)
            self.alike.knows(self.rank, self.step, (joined.progress, joined.over))
        await meeting.sums(self.step)
        self.left = await self._or_failed(joined.leave(LEAVE_S, True), exchange)
        self.alike.left(self.rank, (self.rounds.steps, self.rounds.tokens))

    async def _train(self, step: int) -> None:
        """Speeds vary, of ranks too, and now and then a step takes ten times as long."""
        drawn = self.world.chance.integer("step", self.learner, self.life, step)
        own = self.world.chance.share("own step", self.name, self.life, step)
        stall = 10.0 if drawn % 100 == 0 else 1.0
        await asyncio.sleep(self.step_s * stall * (0.7 + 0.6 * own))
        await self.paused()
        for p, (values, noise) in enumerate(zip(self.values, self._own, strict=True)):
            values *= 1 - LEARNING_RATE
            values += TARGETS[(drawn >> 6 * p) % len(TARGETS)][self.crew.indices[self.rank][p]]
            values += noise

    async def _or_failed(self, result: Any, exchange: "asyncio.Task[None]") -> Any:
        """Wait for something that its exchange is to bring.

        Raises:
            RankGone: it has failed before.
        """
        await asyncio.wait({result, exchange}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            exchange.result()
        return result.result()


def start_ranks(world: Any, number: int, life: int, ranks: int, register: Callable[[WorldRank], None]) -> None:
    """Start all ranks of one life of a learner."""
    name = f"learner-{number}"
    crew = Crew(world.chance, world.layout, name, life, ranks, world.plan.latency_s)
    incarnation = world.chance.hex(16, "incarnation", name, life)
    alike = Alike(crew, incarnation, world.oracle)
    for rank in range(ranks):
        WorldRank(world, number, crew, rank, alike, incarnation)
    for end in crew.ends:
        assert isinstance(end, WorldRank)
        register(end)
