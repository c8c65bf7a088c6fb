"""What one rank does beside its training: connected to the others it carries its part; rank 0's is the learner's
exchange. asyncio.

Coroutines over the bus and the connections: `rank_thread` gives them a thread of their own, simulations run them in
virtual time. Joining, once all are connected:

| rank 0 | every rank |
|---|---|
| joins the run; servers upload version 0 and pull | carries its part |
| asks all for their moments | looks for them in its own state folder |
| says what all have in common, and what to begin with | enters |
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import structlog

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.errors import BusError, IdTaken, RankGone
from diloco.pipeline.messages.run import Event, RunState
from diloco.pipeline.payload import codec
from diloco.pipeline.retry import Outages
from diloco.pipeline.transfer.payloads import Offload
from diloco.pipeline.waiting import meanwhile
from diloco.workers.background import offload
from diloco.workers.encoding import AT_ONCE, OnHost
from diloco.workers.exchange.carrier import Carrier
from diloco.workers.exchange.exchange import Exchange
from diloco.workers.exchange.exchange_thread import LOOK_S, say_joined
from diloco.workers.exchange.joining import Joining
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.shared import Shared
from diloco.workers.moments.recovery import Found, Source
from diloco.workers.ranks.exit_barrier import steps_of_all
from diloco.workers.ranks.gather import Part, Snapshot
from diloco.workers.ranks.inflight import UnderWay
from diloco.workers.ranks.rank_carrier import RanksCarrier
from diloco.workers.ranks.rank_learner import Rank
from diloco.workers.ranks.row_ranges import Shares
from diloco.workers.ranks.wires import SAID_S, Wires
from diloco.workers.training import Training


def common(found: Iterable[Found]) -> Source:
    """What all ranks begin with, from what each has found: moments of which a part is missing are of no use."""
    sources = {one.source for one in found}
    return sources.pop() if len(sources) == 1 else "fresh"


class Working:
    """One rank's."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        wires: Wires,
        training: Training,
        shares: Shares,
        joined: "Future[tuple[Any, Found]]",
        abandoned: Callable[[], bool],
        offload: Offload = offload,
    ) -> None:
        """joined: is told of this rank, and the moments to begin with. abandoned: nothing comes of having joined."""
        self._bus, self._clock, self._wires, self._training, self._shares = bus, clock, wires, training, shares
        self._joined, self._abandoned, self._offload = joined, abandoned, offload
        self._log = structlog.get_logger().bind(learner=training.learner, rank=wires.rank)

    async def work(self) -> None:
        """Until cancelled.

        Raises:
            RankGone: a rank is gone, and the learner with it.
            DilocoError: it cannot join.
        """
        leads = not self._wires.rank
        if not leads:  # it can be asked as soon as it is connected
            self._follow()
        try:
            await self._work(leads)
        except IdTaken:
            raise  # who has the name now is not broken
        except Exception as error:
            if self._wires.speaks and (isinstance(error, RankGone) or self._joined.done()):
                await self.say_broken(self._wires.why)
            raise

    async def say_broken(self, why: str) -> None:
        """On the bus, for whoever watches the run."""
        unix_s, who = self._clock.unix(), self._training.learner
        with suppress(TimeoutError, BusError):
            async with asyncio.timeout(SAID_S):
                await self._bus.add_event(Event(name="learner_broken", who=who, detail=why[:500], unix_s=unix_s))

    async def last_words(self, why: str, within_s: float) -> str:
        """Tell the other ranks and the bus that this one ends; why, with what is known of the others."""
        why = f"rank {self._wires.rank} of this learner was asked to end: {why}"
        if self._joined.done():  # all have: they can be asked
            why = f"{why}. The ranks: {await steps_of_all(self._wires, within_s / 2)}"
        await asyncio.wait(
            {asyncio.create_task(one) for one in (self._wires.tell_all(why, said=True), self.say_broken(why))},
            timeout=within_s / 2,
        )
        return why

    async def _work(self, leads: bool) -> None:
        async with self._wires, meanwhile(self._wires.watch()):
            await (self._lead() if leads else asyncio.Event().wait())

    def _part(self, member: Member) -> Part:
        def snapshot(p: int) -> Snapshot:
            return self._training.parameters.snapshot(p).numpy

        return Part(self._wires, member, self._shares, snapshot, self._training.parameters.overwrite)

    def _follow(self) -> None:
        """As one of the ranks that rank 0 speaks for: it only answers."""
        training, log = self._training, self._log
        self._bus.use_spec(training.spec)
        member = Member(
            self._bus,
            self._clock,
            training.learner,
            training.incarnation,
            training.spec,
            training.layout,
            Shared(),
            OnHost(AT_ONCE),
            self._offload,
            Outages(log),
            log,
        )
        Rank(self._wires, self._part(member), training, member.shared, self._joined)

    async def _lead(self) -> None:
        """As the one that speaks for all, until cancelled."""
        training, wires, bus = self._training, self._wires, self._bus
        parts, carriers = list[Part](), list[RanksCarrier]()
        under_way = UnderWay([fragment.elements for fragment in self._shares.layout.fragments])
        who = training.learner, training.incarnation
        own = OnHost(AT_ONCE)
        given = bus, self._clock, *who, training.report
        joining = Joining(*given, offload=self._offload, encoder=own)

        def make_carrier(member: Member) -> Carrier:
            parts.append(self._part(member))
            carriers.append(RanksCarrier(wires, member, under_way))
            return carriers[0]

        try:
            exchange = await joining.join_with(training.spec, training.layout, make_carrier)
            shared, carriers[0].joining = exchange.shared, False
            rank = Rank(wires, parts[0], training, shared, self._joined, exchange, carriers[0], under_way)
            async with meanwhile(self._until_left(exchange), rank.parting.watch()):
                versions = tuple(base.version for base in shared.adoptions.values())
                await say_joined(bus, *who, versions, shared.state)
                await self._enter_all(rank, versions, shared.state)
                await self._tell_which_run(shared)
        finally:
            if self._abandoned() or not self._joined.done():
                await joining.abandon()

    async def _until_left(self, exchange: Exchange) -> None:
        """The exchange's work. As the ranks part, it may still pull what others of them take no more."""
        try:
            await exchange.work()
        except ExceptionGroup as errors:
            others = errors.split(RankGone)[1] if self._wires.leaving else errors
            if others is not None:
                raise others.exceptions[0] from None

    async def _tell_which_run(self, shared: Shared) -> None:
        """Until cancelled. At a run's start it may not be known as all enter; no rank saves its moments until it is."""
        told: float | None = None
        while True:
            state = shared.state
            if state is not None and state.started_unix_s != told:
                told = state.started_unix_s
                for rank in range(1, self._wires.ranks):
                    self._wires.tell(rank, "know", codec.encode(state))
            await asyncio.sleep(LOOK_S)

    async def _enter_all(self, rank: Rank, versions: Sequence[int], state: RunState | None) -> None:
        wires, ranks = self._wires, range(self._wires.ranks)
        encoded = None if state is None else codec.encode(state)
        said = await asyncio.gather(*(wires.ask(one, "recover", list(versions), encoded) for one in ranks))
        source = common(Found(one) for one in said)
        self._log.info("ranks_recovered", source=source, ranks=len(said), found=sorted(set(said)))
        begin = rank.begin_with()
        await asyncio.gather(*(wires.ask(one, "enter", source, begin) for one in ranks))
