"""The work of a rank alongside its training: it connects to the other ranks and transfers; rank 0 also exchanges.

These are coroutines over the bus and the connections: `rank_learner.RankThread` runs them in a thread of their own,
simulations run them in virtual time. After all ranks are connected, they join like this:

| rank 0 | every rank |
|---|---|
| joins the run; servers upload version 0 and pull | does its share of the transfers |
| asks all ranks for their moments | looks for moments in its own state folder |
| says what all have in common, and what to begin with | enters |
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

import structlog

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.errors import BusError, IdTaken, RankGone
from diloco.pipeline.messages.run import Event, Phase, RunState
from diloco.pipeline.payload import codec
from diloco.pipeline.retry import Outages
from diloco.pipeline.transfer.payloads import Offload
from diloco.pipeline.waiting import in_background
from diloco.workers.background import offload
from diloco.workers.encoding import AT_ONCE, OnHost
from diloco.workers.exchange.carrier import Carrier
from diloco.workers.exchange.exchange import Exchange
from diloco.workers.exchange.joining import Joining, log_joined
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.shared import Shared
from diloco.workers.moments.recovery import FoundMoments, Source
from diloco.workers.ranks.gather import Replicas, TakeSnapshot, Transfers
from diloco.workers.ranks.placement import Shares
from diloco.workers.ranks.rank_carrier import InFlight, RanksCarrier, SnapshotAt, SnapshotRequests
from diloco.workers.ranks.shard_broadcast import ShardBroadcast
from diloco.workers.ranks.shutdown import ExitBarrier, steps_of_all
from diloco.workers.ranks.step_agreement import Sum
from diloco.workers.ranks.transport import INFORM_S, REPORT_S, Transport
from diloco.workers.rounds import Base
from diloco.workers.times import TIMES
from diloco.workers.training import Training

# Seconds beyond the time allowed for leaving (`within_s`) until the ranks give up on one that has not come to leave.
GOODBYE_S = 30.0
# Seconds. When a rank dies, a collective may fail before its connections report it, so wait this long for the cause.
CAUSE_S = 2.0
# Seconds between two polls of a sum in flight: the first interval, and the longest to which it grows.
POLL_S = 0.001, 0.02


class Rank:
    """A rank's side in its exchange thread."""

    def __init__(
        self,
        transport: Transport,
        transfers: Transfers,
        training: Training,
        shared: Shared,
        joined: "Future[tuple[Rank, FoundMoments]]",
        exchange: Exchange[SnapshotAt] | None = None,
        carrier: RanksCarrier | None = None,
        in_flight: InFlight | None = None,
    ) -> None:
        """exchange, carrier, in_flight: only at rank 0. joined: receives this rank and the first moments."""
        self.transfers, self.shared, self.exchange, self.in_flight = transfers, shared, exchange, in_flight
        self.carrier = carrier
        self._transport, self._training, self._joined = transport, training, joined
        self._found = FoundMoments("start")
        self.begin: Mapping[int, int] = {}
        """Maps a fragment to the number of the global that training begins with."""
        self.bases: dict[int, Base] = {}
        """The bases behind `begin`; filled only at rank 0."""
        self.late = False
        """True if the run was already over when all had joined."""
        self.snapshot_requests, self.exit_barrier = SnapshotRequests(transport), ExitBarrier(transport)
        self.shard_broadcast, self.replicas = ShardBroadcast(transport), Replicas(transport)
        self._left_in_order: bool | None = None
        """True if the learner left in order, False if not, None until it has left."""
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        transport.handle(
            recover=self._recover, know=self._know, enter=self._enter, goodbye=self._take_goodbye, go=self._go
        )

    def begin_with(self) -> list[tuple[int, int]]:
        """Take the adoptions that training begins with; return (fragment, number) of each. Only at rank 0."""
        adoptions = self.shared.adoptions
        self.bases = {p: adoptions.pop(p) for p in sorted(adoptions)}
        return [(p, base.values) for p, base in self.bases.items()]

    async def _recover(self, _: int, versions: list[int], encoded: bytes | None) -> Source:
        state = None if encoded is None else codec.decode(RunState, encoded)
        self.late = state is not None and state.phase is not Phase.RUNNING
        if self.exchange is None:
            self.shared.state = state
        self._found = await self._training.recovery.find(None, tuple(versions), state)
        return self._found.source

    async def _know(self, _: int, encoded: bytes) -> None:
        self.shared.state = codec.decode(RunState, encoded)

    async def _enter(self, _: int, source: Source, begin: list[tuple[int, int]]) -> None:
        self.begin = dict(begin)
        self.transfers.training_idle.clear()
        if self._found.source != source:
            if self._found.saved is not None and (names := sorted(self._found.saved.objects)):
                detail = "not all ranks found a checkpoint, so none uses its own: objects start as they were passed"
                structlog.get_logger().warning("state_not_restored", names=names, detail=detail)
            self._found = FoundMoments(source)
        self._joined.set_result((self, self._found))

    def when_done(self, total: Sum, do: Callable[[], object]) -> None:
        """Call `do` as soon as a sum is complete."""
        self._transport.start_task(self._when_done(total, do))

    @staticmethod
    async def _when_done(total: Sum, do: Callable[[], object]) -> None:
        pause_s, max_s = POLL_S
        while not total.done:
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, max_s)
        do()

    async def break_off(self, error: BaseException, why: str) -> None:
        """Make all other ranks end because this rank's loop has failed, perhaps because another rank is gone."""
        if isinstance(error, (RuntimeError, RankGone)) and await self._transport.cause(CAUSE_S):
            # The cause is another rank, and this thread ends and reports it: usually before this sleep is over.
            await asyncio.sleep(CAUSE_S + INFORM_S)
        else:
            await self._transport.end(why)

    async def send_goodbye(self, in_order: bool) -> None:
        """Tell all ranks that the learner has left. Only at rank 0."""
        # Two rounds: all ranks must know before the first one goes, or the rest would take it for a dead rank.
        await self._transport.ask_all("goodbye", in_order)
        ranks = range(self._transport.ranks)  # some end before they answer
        await asyncio.gather(*(self._transport.ask(rank, "go") for rank in ranks), return_exceptions=True)

    async def _take_goodbye(self, _: int, in_order: bool) -> None:
        self._transport.leaving, self._left_in_order = True, in_order

    async def _go(self, _: int) -> None:
        self._gone.set_result(None)

    async def wait_for_goodbye(self, within_s: float) -> bool:
        """Wait for rank 0's goodbye; return whether the learner left in order.

        Raises:
            RankGone: the goodbye did not come in time, or a rank has not left its loop.
        """
        await self.exit_barrier.wait_for_all()
        lost = asyncio.create_task(self._transport.wait_disconnected(0))
        try:
            async with asyncio.timeout(within_s):
                await asyncio.wait({self._gone, lost}, return_when=asyncio.FIRST_COMPLETED)
                if self._left_in_order is None:  # rank 0 was lost before its goodbye: the transport ends this thread
                    await self._gone
        except TimeoutError:
            raise RankGone("rank 0 of this learner did not leave in time") from None
        finally:
            lost.cancel()
        return bool(self._left_in_order)


class RankExchange:
    """One rank's work in its exchange thread."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        transport: Transport,
        training: Training,
        shares: Shares,
        joined: "Future[tuple[Rank, FoundMoments]]",
        abandoned: Callable[[], bool],
        offload: Offload = offload,
    ) -> None:
        """joined: receives this rank and the moments to begin with. abandoned: True if the caller gave up joining."""
        self._bus, self._clock, self._transport, self._training, self._shares = bus, clock, transport, training, shares
        self._joined, self._abandoned, self._offload = joined, abandoned, offload
        self._log = structlog.get_logger().bind(learner=training.learner, rank=transport.rank)

    async def work(self) -> None:
        """Work until cancelled.

        Raises:
            RankGone: a rank is gone, and the learner with it.
            DilocoError: the rank cannot join.
        """
        leads = not self._transport.rank
        if not leads:  # registers the handlers before connecting: requests may come at once
            self._follow()
        try:
            async with self._transport, in_background(self._transport.watch()):
                await (self._lead() if leads else asyncio.Event().wait())
        except IdTaken:
            raise  # another process has the name now, and that learner is not broken
        except Exception as error:
            if self._transport.reports and (isinstance(error, RankGone) or self._joined.done()):
                await self.report_broken(self._transport.reason)
            raise

    async def report_broken(self, why: str) -> None:
        """Report on the bus that the learner is broken, for everybody who watches the run."""
        unix_s, who = self._clock.unix(), self._training.learner
        with suppress(TimeoutError, BusError):
            async with asyncio.timeout(REPORT_S):
                await self._bus.add_event(Event(name="learner_broken", who=who, detail=why[:500], unix_s=unix_s))

    async def report_end(self, why: str, within_s: float) -> str:
        """Tell the other ranks and the bus why this rank ends; return the reason, with what is known of the others."""
        why = f"rank {self._transport.rank} of this learner was asked to stop: {why}"
        if self._joined.done():  # all ranks have joined, so all can be asked
            why = f"{why}. The ranks: {await steps_of_all(self._transport, within_s / 2)}"
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s / 2):
                informed = self._transport.end_all(why, reported=True)
                await asyncio.gather(informed, self.report_broken(why), return_exceptions=True)
        return why

    def _transfers(self, member: Member) -> Transfers:
        def snapshot(p: int) -> TakeSnapshot:
            return self._training.parameters.snapshot(p).numpy

        return Transfers(self._transport, member, self._shares, snapshot, self._training.parameters.overwrite)

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
            Outages(log, TIMES.retry),
            log,
        )
        Rank(self._transport, self._transfers(member), training, member.shared, self._joined)

    async def _lead(self) -> None:
        """Work as rank 0, which speaks for all ranks, until cancelled."""
        training, transport, bus = self._training, self._transport, self._bus
        transfers, carriers = list[Transfers](), list[RanksCarrier]()
        servers = self._shares.servers
        in_flight = InFlight([fragment.elements for fragment in self._shares.layout.fragments], servers)
        who = training.learner, training.incarnation
        joining = Joining(bus, self._clock, *who, training.report, offload=self._offload, encoder=OnHost(AT_ONCE))

        def make_carrier(member: Member) -> Carrier[SnapshotAt]:
            transfers.append(self._transfers(member))
            carriers.append(RanksCarrier(transport, member, in_flight, servers))
            return carriers[0]

        # Not before all ranks are at work: one that does not reach Redis yet would not read what it is sent.
        await asyncio.gather(*(transport.ask(rank, "steps") for rank in range(1, transport.ranks)))
        try:
            exchange = await joining.join_with(training.spec, training.layout, make_carrier)
            shared, carriers[0].joining = exchange.shared, False
            rank = Rank(transport, transfers[0], training, shared, self._joined, exchange, carriers[0], in_flight)
            async with in_background(self._until_left(exchange), rank.exit_barrier.watch()):
                versions = tuple(base.version for base in shared.adoptions.values())
                await log_joined(bus, *who, versions, shared.state)
                await self._enter_all(rank, versions, shared.state)
                await self._tell_which_run(shared)
        finally:
            if self._abandoned() or not self._joined.done():
                await joining.abandon()

    async def _until_left(self, exchange: Exchange[SnapshotAt]) -> None:
        """Run the exchange's work."""
        try:
            await exchange.work()
        except ExceptionGroup as errors:
            # While the ranks leave, the exchange may still pull for ranks that are gone already: that is not a failure.
            others = errors.split(RankGone)[1] if self._transport.leaving else errors
            if others is not None:
                raise others.exceptions[0] from None

    async def _tell_which_run(self, shared: Shared) -> None:
        """Send the run's state to the other ranks whenever its start time changes. Runs until cancelled.

        At a run's start the state may not be known when the ranks enter; no rank saves its moments until it is.
        """
        sent: float | None = None
        while True:
            state = shared.state
            if state is not None and state.started_unix_s != sent:
                sent = state.started_unix_s
                for rank in range(1, self._transport.ranks):
                    self._transport.notify(rank, "know", codec.encode(state))
            await asyncio.sleep(TIMES.check_s)

    async def _enter_all(self, rank: Rank, versions: Sequence[int], state: RunState | None) -> None:
        encoded = None if state is None else codec.encode(state)
        sources = await self._transport.ask_all("recover", list(versions), encoded)
        # Moments are useful only if no rank's part is missing.
        source: Source = sources[0] if len(set(sources)) == 1 else "fresh"
        self._log.info("ranks_recovered", source=source, ranks=len(sources), found=sorted(set(sources)))
        await self._transport.ask_all("enter", source, rank.begin_with())
