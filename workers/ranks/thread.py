"""The exchange thread of one rank: connected to the others, it carries its part; rank 0's is the learner's exchange.

Joining, once all are connected:

| rank 0 | every rank |
|---|---|
| joins the run; servers upload version 0 and pull | carries its part |
| asks all for their moments | looks for them in its own state folder |
| says what all have in common, and what to begin with | enters |
"""

import asyncio
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import structlog

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import RankGone
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.payload import codec
from diloco.pipeline.retry import Outages
from diloco.pipeline.waiting import meanwhile
from diloco.workers.background import offload
from diloco.workers.encoding import AT_ONCE, OnHost
from diloco.workers.exchange import reaching
from diloco.workers.exchange.carrier import Carrier
from diloco.workers.exchange.exchange_thread import LOOK_S, ExchangeThread
from diloco.workers.exchange.joining import Joining
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.shared import Shared
from diloco.workers.moments.recovery import Found, Source
from diloco.workers.ranks.agreed import UnderWay
from diloco.workers.ranks.carrier import RanksCarrier
from diloco.workers.ranks.found import Meeting
from diloco.workers.ranks.joined import JoinedRank, Rank
from diloco.workers.ranks.part import Part, Snapshot
from diloco.workers.ranks.shares import Shares
from diloco.workers.ranks.wires import Wires
from diloco.workers.stopping import Stopping
from diloco.workers.training import Training

NOTICED_S = 10.0
"""A training thread that waits for a rank that is gone may wait for ever. After so long its process is ended."""
BROKEN_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: the learner may be started again."""


def common(found: Iterable[Found]) -> Source:
    """What all ranks begin with, from what each has found: moments of which a part is missing are of no use."""
    sources = {one.source for one in found}
    return sources.pop() if len(sources) == 1 else "fresh"


class RankThread(ExchangeThread):
    """One rank's."""

    def __init__(
        self, url: str, run: str, training: Training, meeting: Meeting, shares: Shares, stopping: Stopping
    ) -> None:
        super().__init__(url, run, training)
        self._meeting, self._shares, self._stopping = meeting, shares, stopping
        self._log = structlog.get_logger().bind(learner=training.learner, rank=meeting.rank)
        self._noticed = threading.Event()

    def _entered(self, exchange: Any) -> JoinedRank:
        return JoinedRank(self._training, exchange, self, self._meeting, self._shares, self._stopping)

    def notice(self) -> None:
        """As `ExchangeThread`."""
        self._noticed.set()

    def join(self) -> None:
        """As `ExchangeThread`; the ranks part."""
        self.notice()
        super().join()
        if self.failure is None:
            self._meeting.listener.close()
        elif not isinstance(self.failure, RankGone):
            self._meeting.abort()

    def _work(self) -> None:
        super()._work()
        if isinstance(self.failure, RankGone):
            self._log.error("rank_gone", detail=str(self.failure))
            self._meeting.abort()
            if not self._noticed.wait(NOTICED_S):
                self._log.error("rank_ended", detail="the training waits for the rank that is gone: this process ends")
                os._exit(BROKEN_STATUS)

    # --- inside: the exchange thread ----------------------------------------------------------------------

    async def _join_and_work(self) -> None:
        meeting, training = self._meeting, self._training
        bus = await reaching.reach(self._url, self._run_name, training.learner)
        try:
            most = max(fragment.elements for fragment in self._shares.layout.fragments)
            wires = Wires(meeting.rank, meeting.addresses, meeting.listener, meeting.token, most)
            async with wires, meanwhile(wires.watch()):
                await (self._follow(wires, bus) if meeting.rank else self._lead(wires, bus))
        finally:
            await bus.close()

    def _part(self, wires: Wires, member: Member) -> Part:
        def snapshot(p: int) -> Snapshot:
            return self._training.parameters.snapshot(p).numpy

        return Part(wires, member, self._shares, snapshot, self._training.parameters.overwrite)

    async def _follow(self, wires: Wires, bus: Bus) -> None:
        """As one of the ranks that rank 0 speaks for, until cancelled."""
        training, log = self._training, self._log
        bus.use_groups(training.spec.sync.groups)
        member = Member(
            bus,
            LoopClock(),
            training.learner,
            training.incarnation,
            training.spec,
            training.layout,
            Shared(),
            OnHost(AT_ONCE),
            offload,
            Outages(log),
            log,
        )
        Rank(wires, self._part(wires, member), training, member.shared, self._joined)
        await asyncio.Event().wait()

    async def _lead(self, wires: Wires, bus: Bus) -> None:
        """As the one that speaks for all, until cancelled."""
        training, parts, carriers, under_way = self._training, list[Part](), list[RanksCarrier](), UnderWay()
        who = training.learner, training.incarnation
        joining = Joining(bus, LoopClock(), *who, training.report, encoder=OnHost(AT_ONCE))

        def make_carrier(member: Member) -> Carrier:
            parts.append(self._part(wires, member))
            carriers.append(RanksCarrier(wires, member, under_way.serving))
            return carriers[0]

        try:
            exchange = await joining.join_with(training.spec, training.layout, make_carrier)
            shared, carriers[0].joining = exchange.shared, False
            rank = Rank(wires, parts[0], training, shared, self._joined, exchange, carriers[0], under_way)
            async with meanwhile(exchange.work()):
                versions = tuple(base.version for base in shared.adoptions.values())
                await self._say_joined(bus, versions, shared.state)
                await self._enter_all(wires, rank, versions, shared.state)
                await self._tell_which_run(wires, shared)
        finally:
            if self._abandoned or not self._joined.done():
                await joining.abandon()

    async def _tell_which_run(self, wires: Wires, shared: Shared) -> None:
        """Until cancelled. At a run's start it may not be known as all enter; no rank saves its moments until it is."""
        told: float | None = None
        while True:
            state = shared.state
            if state is not None and state.started_unix_s != told:
                told = state.started_unix_s
                for rank in range(1, wires.ranks):
                    wires.tell(rank, "know", codec.encode(state))
            await asyncio.sleep(LOOK_S)

    async def _enter_all(self, wires: Wires, rank: Rank, versions: Sequence[int], state: RunState | None) -> None:
        ranks, encoded = range(wires.ranks), None if state is None else codec.encode(state)
        said = await asyncio.gather(*(wires.ask(one, "recover", list(versions), encoded) for one in ranks))
        source = common(Found(one) for one in said)
        self._log.info("ranks_recovered", source=source, ranks=len(said), found=sorted(set(said)))
        begin = rank.begin_with()
        await asyncio.gather(*(wires.ask(one, "enter", source, begin) for one in ranks))
