"""How a learner joins its run: it takes its id, agrees on the spec, sees to version 0, pulls every fragment. asyncio.

Learners wait here only. What joining waits for is said where that takes long.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.errors import BadMessage, BusError, BusFull, BusUnavailable, DilocoError, NotPermitted
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.run import Event, LearnerReport
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload import codec
from diloco.pipeline.retry import Outages
from diloco.pipeline.transfer.payloads import Offload
from diloco.pipeline.waiting import meanwhile
from diloco.workers.background import offload
from diloco.workers.encoding import Encoder, OnHost
from diloco.workers.exchange.carrier import Carrier, OwnCarrier, some_at_once
from diloco.workers.exchange.exchange import Exchange
from diloco.workers.exchange.first_version import CLAIM_TTL_S, Version0
from diloco.workers.exchange.identity import Identity
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.pulling import Pulling
from diloco.workers.exchange.reporting import Reporting
from diloco.workers.exchange.shared import Shared
from diloco.workers.exchange.spec_check import Agreement, compare
from diloco.workers.exchange.work_queue import ShardClaims

Float32 = npt.NDArray[np.float32]

POLL_S = 0.05
ABANDON_S = 2.0
PATIENCE_S = 3.0
"""After so long it is said what is waited for."""


class Joining:
    """One incarnation of a learner before it is in its run."""

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
        """As `Member`. report: called with `left` whenever one is due; must not block. encoder: None: `OnHost`."""
        self._bus, self._clock, self._learner, self._incarnation = bus, clock, learner, incarnation
        self._offload, self._encoder = offload, encoder or OnHost()
        self._log = structlog.get_logger().bind(learner=learner)
        self._shared, self._outages = Shared(), Outages(self._log)
        self._identity = Identity(bus, clock, learner, incarnation, self._outages.retry)
        self._claims = ShardClaims(bus, f"{learner}.{incarnation}", self._shared)
        self._reporting = Reporting(self._identity, clock, report, self._outages, self._shared, self._claims)

    async def join(self, spec: Spec, layout: Layout, initial: Callable[[int], Float32]) -> Exchange:
        """As `join_with`, as a learner that is one process.

        initial: fragment -> flat float32 vector (elements,) of the initial parameters.
        """
        return await self.join_with(spec, layout, lambda member: OwnCarrier(member, initial))

    async def join_with(self, spec: Spec, layout: Layout, make_carrier: Callable[[Member], Carrier]) -> Exchange:
        """Agree on the spec and fetch every fragment; upload version 0 if nobody has.

        Args:
            spec: this learner's proposal.
            layout: of its model.
            make_carrier: of the payloads.

        Raises:
            SpecMismatch: the run was set up otherwise.
            IdTaken: another process is this learner.
        """
        retry = self._outages.retry
        held = codec.decode(Spec, await retry(self._bus.propose_spec, codec.encode(spec)))
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
        async with meanwhile(reporting, say_why(self._bus, fragments, self._log)):
            await version_0.ensure(self._incarnation, trained=False)
            while missing := [p for p in fragments if p not in pulling.latest]:
                heads = dict(zip(missing, await retry(self._bus.read_heads, missing), strict=True))
                await some_at_once(partial(self._pull, pulling, heads), missing)
        if self._shared.state is None:  # the heads came right behind it: whose moments these are goes by it
            await retry(self._reporting.write)
        unix_s = self._clock.unix()
        joined = Event(name="learner_joined", who=self._learner, detail=self._incarnation, unix_s=unix_s)
        await retry(self._tell, joined)
        self._outages.count = 0  # those until here lost nothing: nothing was published
        return Exchange(member, agreement, version_0, carrier, pulling, self._reporting, self._claims)

    async def _pull(self, pulling: Pulling, heads: Mapping[int, Head | None], p: int) -> None:
        head, retry = heads[p], self._outages.retry
        if head is not None and not await retry(pulling.pull, head):
            await retry(self._reporting.write)  # its owner sees that there is somebody who cannot
            await asyncio.sleep(POLL_S)

    async def _tell(self, event: Event) -> None:
        """Nobody needs to know of it to train: a stream that any learner can spoil keeps nobody out."""
        try:
            await self._bus.add_event(event)
        except (BusUnavailable, BusFull, NotPermitted):
            raise
        except (BusError, BadMessage) as error:
            self._log.warning("event_not_told", name=event.name, detail=str(error))

    async def abandon(self) -> None:
        """Joining came to nothing: nobody must wait for this learner. Instead of `leave`, with nothing running."""
        if self._reporting.written:
            self._reporting.left = True
            with suppress(TimeoutError, DilocoError):
                async with asyncio.timeout(ABANDON_S):
                    await self._reporting.write()


async def say_why(bus: Bus, fragments: Sequence[int], log: Any) -> None:
    """Say what joining waits for where it takes long, once for each reason, until cancelled."""
    said = ""
    while True:
        await asyncio.sleep(PATIENCE_S)
        with suppress(BusError):  # which is told by whoever needs the bus
            why = await reason(bus, fragments)
            if why and why != said:
                log.warning("joining_delayed", detail=why)
            said = why


async def reason(bus: Bus, fragments: Sequence[int]) -> str:
    """What a learner that joins waits for, and what to do; empty where it is for its own pulls.

    Raises:
        BusError: the bus cannot be read.
    """
    if None not in await bus.read_heads(fragments):
        return ""
    syncers = await bus.read_syncers()
    if not syncers:
        return f"no syncer serves run {bus.keys.run!r}: start `diloco syncer --run {bus.keys.run}` with the same Redis"
    if await bus.read_initial() is None:
        return (
            "a learner uploads the first parameters, and the others wait for it; if it has died, another one begins "
            f"within {CLAIM_TTL_S:g} s"
        )
    return f"syncer {', '.join(sorted(set(syncers.values())))} has yet to take over the first parameters"
