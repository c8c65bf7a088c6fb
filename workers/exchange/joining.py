"""Join a run: take the learner's id, agree on the spec, ensure version 0, pull every fragment. Runs on asyncio.

This is the only place where a learner waits for others. If it takes long, a log line says what it waits for.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import structlog

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.bus.schema import decode_spec
from diloco.pipeline.errors import BadMessage, BusError, BusFull, BusUnavailable, DilocoError, NotPermitted
from diloco.pipeline.fragments import Layout
from diloco.pipeline.liveness import live_learners
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.run import Event, LearnerReport, RunState
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload import codec
from diloco.pipeline.retry import Outages
from diloco.pipeline.transfer.payloads import Offload
from diloco.pipeline.waiting import in_background
from diloco.workers.background import offload
from diloco.workers.encoding import Encoder, Float32, OnHost, Snapshot
from diloco.workers.exchange.carrier import Carrier, OwnCarrier, run_concurrently
from diloco.workers.exchange.exchange import Exchange
from diloco.workers.exchange.first_version import Version0
from diloco.workers.exchange.identity import Identity
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.pulling import Pulling
from diloco.workers.exchange.reporting import Reporting
from diloco.workers.exchange.shared import Shared
from diloco.workers.exchange.spec_check import Agreement, compare
from diloco.workers.exchange.work_queue import ShardClaims
from diloco.workers.times import TIMES

S = TypeVar("S")


class Joining:
    """One incarnation of a learner that is not in its run yet."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        learner: str,
        incarnation: str,
        report: Callable[[bool], LearnerReport],
        *,
        offload: Offload = offload,
        encoder: Encoder | None = None,
    ) -> None:
        """Prepare to join; nothing is sent yet.

        Args:
            bus, clock, learner, incarnation, offload: see `Member`.
            report: makes a report when one is due, called with `left`; must not block.
            encoder: None: `OnHost`.
        """
        self._bus, self._clock, self._learner, self._incarnation = bus, clock, learner, incarnation
        self._offload, self._encoder = offload, encoder or OnHost()
        self._log = structlog.get_logger().bind(learner=learner)
        self._shared, self._outages = Shared(), Outages(self._log, TIMES.retry)
        self._identity = Identity(bus, clock, learner, incarnation, self._outages.retry)
        self._claims = ShardClaims(bus, f"{learner}.{incarnation}", self._shared)
        self._reporting = Reporting(self._identity, clock, report, self._outages, self._shared, self._claims)

    async def join(self, spec: Spec, layout: Layout, initial: Callable[[int], Float32]) -> Exchange[Snapshot]:
        """Join as a learner that is one process; see `join_with`.

        initial: fragment -> flat float32 vector (elements,) of the initial parameters.
        """
        return await self.join_with(spec, layout, lambda member: OwnCarrier(member, initial))

    async def join_with(self, spec: Spec, layout: Layout, make_carrier: Callable[[Member], Carrier[S]]) -> Exchange[S]:
        """Agree on the spec and fetch every fragment; upload version 0 if nobody has.

        Args:
            spec: this learner's proposal.
            layout: of its model.
            make_carrier: makes the carrier of its payloads.

        Raises:
            SpecMismatch: the run was set up otherwise.
            IdTaken: another process is this learner.
        """
        retry = self._outages.retry
        held = decode_spec(self._bus.keys, await retry(self._bus.propose_spec, codec.encode(spec)))
        compare(spec, held)
        if spec.frozen and held.frozen is None:
            self._log.warning("frozen_not_compared", detail="the run lets frozen parameters differ (same_frozen=False)")
        member = Member(
            self._bus,
            self._clock,
            self._learner,
            self._incarnation,
            held,
            layout,
            self._shared,
            self._encoder,
            self._offload,
            self._outages,
            self._log,
        )
        agreement = Agreement(member)
        carrier = make_carrier(member)
        version_0 = Version0(member, agreement, carrier)
        pulling = Pulling(member, carrier)
        self._bus.use_spec(held)
        fragments = range(len(layout.fragments))
        await self._identity.acquire(self._reporting.write)
        reporting = self._outages.forever(self._reporting.keep_reporting)
        async with in_background(reporting, log_why(self._bus, fragments, self._log)):
            await version_0.ensure(self._incarnation, trained=False)
            while missing := [p for p in fragments if p not in pulling.latest]:
                heads = dict(zip(missing, await retry(self._bus.read_heads, missing), strict=True))
                await run_concurrently(partial(self._pull, pulling, heads), missing)
        # The syncer writes the run's state just before the first heads, so a report may have missed it. Recovery of the
        # moments needs it, since moments belong to one run.
        if self._shared.state is None:
            await retry(self._reporting.write)
        unix_s = self._clock.unix()
        joined = Event(name="learner_joined", who=self._learner, detail=self._incarnation, unix_s=unix_s)
        await retry(self._tell, joined)
        self._outages.count = 0  # outages while joining lost nothing, since nothing was published
        return Exchange(member, agreement, version_0, carrier, pulling, self._reporting, self._claims)

    async def _pull(self, pulling: Pulling, heads: Mapping[int, Head | None], p: int) -> None:
        head, retry = heads[p], self._outages.retry
        if head is not None and not await retry(pulling.pull, head):
            await retry(self._reporting.write)  # shows the head's owner that a learner failed to pull it
            await asyncio.sleep(TIMES.poll_s)

    async def _tell(self, event: Event) -> None:
        """Add an event to the run; a failure of only the event stream is logged.

        Training does not need the event, and any learner can spoil that stream, so its failure must not keep anyone
        out.
        """
        try:
            await self._bus.add_event(event)
        except (BusUnavailable, BusFull, NotPermitted):
            raise
        except (BusError, BadMessage) as error:
            self._log.warning("event_not_told", name=event.name, detail=str(error))

    async def abandon(self) -> None:
        """Withdraw after joining has failed, so that nobody waits for this learner.

        It is called instead of `leave`, when nothing else of the exchange runs.
        """
        if self._reporting.written:
            self._reporting.left = True
            with suppress(TimeoutError, DilocoError):
                async with asyncio.timeout(TIMES.goodbye_s):
                    await self._reporting.write()


async def log_joined(bus: Bus, learner: str, incarnation: str, versions: Sequence[int], state: RunState | None) -> None:
    """Log that a learner has joined its run, with its versions and the number of live learners."""
    live = None
    with suppress(BusError):  # the number is only for the log line
        live = len(live_learners(await bus.read_reports(), state))
    least, most = min(versions), max(versions)
    structlog.get_logger().info(
        "learner_joined",
        run=bus.keys.run,
        learner=learner,
        incarnation=incarnation,
        version=least if least == most else f"{least} to {most}",
        fragments=len(versions),
        learners_live=live,
    )


async def log_why(bus: Bus, fragments: Sequence[int], log: Any) -> None:
    """Log what joining waits for if it takes long, once for each reason; runs until cancelled."""
    logged = ""
    while True:
        await asyncio.sleep(TIMES.joining_told_s)
        with suppress(BusError):  # the calls that need the bus log its outages
            why = await reason(bus, fragments)
            if why and why != logged:
                log.warning("joining_delayed", detail=why)
            logged = why


async def reason(bus: Bus, fragments: Sequence[int]) -> str:
    """Return what a joining learner is waiting for and what to do about it; empty if it is just pulling.

    Raises:
        BusError: the bus cannot be read.
    """
    if None not in await bus.read_heads(fragments):
        return ""
    syncers = await bus.read_syncers()
    if not syncers:
        return f"run {bus.keys.run!r} has no syncer: start `diloco syncer --run {bus.keys.run}` on the same Redis"
    if await bus.read_initial() is None:
        return (
            "a learner is uploading the initial parameters, and the others are waiting for it; if it has died, "
            f"another learner starts within {TIMES.initial_claim_ttl_s:g} s"
        )
    return f"syncer {', '.join(sorted(set(syncers.values())))} has not yet taken over the initial parameters"
