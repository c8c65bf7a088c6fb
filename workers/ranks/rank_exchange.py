"""The work of a rank beside its training: connecting to the other ranks and transferring; rank 0 also exchanges.
asyncio.

These are coroutines over the bus and the connections: `rank_thread` runs them in a thread of their own, simulations run
them in virtual time. After all ranks are connected, they join like this:

| rank 0 | every rank |
|---|---|
| joins the run; servers upload version 0 and pull | does its share of the transfers |
| asks all ranks for their moments | looks for moments in its own state folder |
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
    """Return the source of moments for all ranks: moments are useful only if no rank's part is missing."""
    sources = {one.source for one in found}
    return sources.pop() if len(sources) == 1 else "fresh"


class Working:
    """One rank's work in its exchange thread."""

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
        """joined: receives this rank and the moments to begin with. abandoned: True if the caller gave up joining."""
        self._bus, self._clock, self._wires, self._training, self._shares = bus, clock, wires, training, shares
        self._joined, self._abandoned, self._offload = joined, abandoned, offload
        self._log = structlog.get_logger().bind(learner=training.learner, rank=wires.rank)

    async def work(self) -> None:
        """Work until cancelled.

        Raises:
            RankGone: a rank is gone, and the learner with it.
            DilocoError: the rank cannot join.
        """
        leads = not self._wires.rank
        if not leads:  # registers the handlers before connecting: requests may come at once
            self._follow()
        try:
            await self._work(leads)
        except IdTaken:
            raise  # another process has the name now, and that learner is not broken
        except Exception as error:
            if self._wires.speaks and (isinstance(error, RankGone) or self._joined.done()):
                await self.say_broken(self._wires.why)
            raise

    async def say_broken(self, why: str) -> None:
        """Report on the bus that the learner is broken, for everybody who watches the run."""
        unix_s, who = self._clock.unix(), self._training.learner
        with suppress(TimeoutError, BusError):
            async with asyncio.timeout(SAID_S):
                await self._bus.add_event(Event(name="learner_broken", who=who, detail=why[:500], unix_s=unix_s))

    async def last_words(self, why: str, within_s: float) -> str:
        """Tell the other ranks and the bus why this rank ends; return the reason, with what is known of the others."""
        why = f"rank {self._wires.rank} of this learner was asked to end: {why}"
        if self._joined.done():  # all ranks have joined, so all can be asked
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
        """Answer requests as one of the ranks that rank 0 speaks for."""
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
        """Work as rank 0, which speaks for all ranks, until cancelled."""
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
        """Run the exchange's work."""
        try:
            await exchange.work()
        except ExceptionGroup as errors:
            # While the ranks leave, the exchange may still pull for ranks that are gone already: that is no failure.
            others = errors.split(RankGone)[1] if self._wires.leaving else errors
            if others is not None:
                raise others.exceptions[0] from None

    async def _tell_which_run(self, shared: Shared) -> None:
        """Send the run's state to the other ranks whenever its start time changes. Runs until cancelled.

        At a run's start the state may not be known when the ranks enter; no rank saves its moments until it is.
        """
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
