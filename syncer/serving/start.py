"""Before anything is merged: the spec that all agree on, a checkpoint to resume, whether the bus has room. asyncio."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from diloco.pipeline.agreement import WAITING_SYNCER, agree
from diloco.pipeline.bus.ports import Bus, BusInfo, Clock
from diloco.pipeline.bus.server import room
from diloco.pipeline.errors import BusError, UsageError
from diloco.pipeline.findings import Finding
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.outer_cost import Speed, operations_of
from diloco.pipeline.pacing import least_step_s
from diloco.pipeline.payload import codec
from diloco.pipeline.process.cores import product_speed
from diloco.pipeline.retry import retry
from diloco.pipeline.settings import SyncerProcess, SyncSettings, groups_on
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.checkpoints.restoring import restore_checkpoint, taken
from diloco.syncer.intake import Offload
from diloco.syncer.serving.leases import holding, release_all
from diloco.syncer.serving.retrying import EVERY_SECOND, warn

T = TypeVar("T")

LOOK_S = 0.1
"""How often the bus is asked for what others put there: nothing tells when they do."""
WORTH_MEASURING = 1e10
"""Operations of an outer step of all fragments: a tenth of a second of one core."""


class BusWarnings:
    """What is wrong with the server, said once each time it comes up."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()

    def tell(self, info: BusInfo, *findings: Finding) -> None:
        """What the server says of itself now, and what else was found."""
        told = {one: one for one in info.warnings} | {one.about: str(one) for one in findings if one.level != "ok"}
        for what in sorted(told.keys() - self._told):
            structlog.get_logger().warning("bus_warning", detail=told[what])
        self._told = frozenset(told)


@dataclass(frozen=True, slots=True)
class Start:
    """How one syncer comes to the run's spec."""

    bus: Bus
    clock: Clock
    settings: SyncerProcess
    nonce: str
    name: str
    """The syncer's, for the tape."""
    offload: Offload
    bus_warnings: BusWarnings

    async def spec(self) -> Spec:
        """The run's spec: from a checkpoint onto an empty bus, or as the first learner proposed it; waits for it.

        Raises:
            DilocoError: settings, spec or checkpoint cannot be used.
        """
        place = self.settings.resume
        while place is not None and not await _retry(partial(self._resume, place)):  # noqa: ASYNC110  # see LOOK_S
            await asyncio.sleep(LOOK_S)
        self.bus_warnings.tell(await _retry(self.bus.info))  # there may be hours to mend it before anybody trains
        if (data := await _retry(self.bus.read_spec)) is None:
            structlog.get_logger().info("waiting_for_spec", run=self.bus.keys.run)
        while data is None:
            # So that whoever asks for the status can tell a run that waits from one that is not there.
            await _retry(partial(self.bus.announce_syncer, self.nonce, self.name, self.settings.lease_s))
            if "tokens" in self.settings.model_fields_set:
                offer = partial(self.bus.offer_budget, self.settings.tokens, self.settings.lease_s)
                agree(self.settings, {"tokens": await _retry(offer)}, SyncSettings, WAITING_SYNCER)
            await asyncio.sleep(LOOK_S)
            data = await _retry(self.bus.read_spec)
        spec = codec.decode(Spec, data)
        agree(self.settings, spec.sync.model_dump(), SyncSettings)
        return spec

    async def _resume(self, place: str) -> bool:
        """Put the checkpoint on the bus, or what is missing of it: an outage or a restart may have come between.

        Of several syncers that resume the same checkpoint one does it; False: another one may be at it, ask again.

        A learner may have proposed the spec already; what counts is that no fragment has a head of another run.
        """
        groups = self.settings.groups
        if (data := await self.bus.read_spec()) is not None:
            present = codec.decode(Spec, data)
            groups = present.sync.groups
            self.bus.use_spec(present)
            if all(await self.bus.read_heads(range(present.sync.fragments))):
                state = await self.bus.read_state()
                if state is None or not state.base_tokens:
                    raise UsageError(f"the run was started before: {taken(self.bus)}")
                structlog.get_logger().info("already_restored", base_tokens=state.base_tokens)
                return True
        checkpoint = await self.offload(load_checkpoint, place)
        spec = checkpoint.spec
        # Where fragments lie is this bus's, and not the checkpoint's.
        anew = {"groups": groups or groups_on((await self.bus.info()).cluster, spec.sync.fragments)}
        if "tokens" in self.settings.model_fields_set:
            anew["tokens"] = self.settings.tokens
        spec = spec.model_copy(update={"sync": spec.sync.model_copy(update=anew)})
        agree(self.settings, spec.sync.model_dump(), SyncSettings)
        self.bus.use_spec(spec)
        fragments = range(spec.sync.fragments)
        for p in fragments:
            if not await self.bus.acquire_lease(p, self.nonce, self.settings.lease_s):
                return False
        async with holding(self.bus, fragments, self.nonce, self.settings.lease_s):
            await restore_checkpoint(self.bus, checkpoint, spec, self.nonce, self.name, self.clock, self.offload)
        await release_all(self.bus, self.nonce, len(fragments))
        structlog.get_logger().info("checkpoint_restored", path=str(checkpoint.folder), tokens=checkpoint.state.tokens)
        return True


async def _retry(call: Callable[[], Awaitable[T]]) -> T:
    """Call again after an outage, or after another syncer has restored what this one was about to."""
    return await retry(call, EVERY_SECOND.waits(), BusError, warn)


async def check_memory(bus: Bus, layout: Layout, sync: SyncSpec) -> None:
    """What the run needs of the bus is what `diloco plan` says for as many learners.

    Raises:
        UsageError: its memory cannot hold the run.
    """
    info = await bus.info()
    found = room(info.maxmemory_bytes, layout.elements, sync, backlogs=info.backlogs_bytes)
    if found.level == "error":
        raise UsageError(f"{found} (`diloco doctor` looks at all of it)")


async def speed_for(sync: SyncSpec, layout: Layout, offload: Offload) -> Speed:
    """How fast this machine multiplies matrices; measured, and told, where the outer step has enough to matter."""
    fragments = [operations_of((slot.tensor for slot in f.slots), sync.outer) for f in layout.fragments]
    if sum(fragments) < WORTH_MEASURING:
        return Speed()
    speed: Speed = await offload(product_speed)
    outer_s, together_s = max(fragments) / speed.flops, sum(fragments) / speed.flops / speed.at_once
    structlog.get_logger().info(
        "outer_step_reckoned",
        slowest_fragment_s=round(outer_s, 3),
        all_fragments_s=round(together_s, 3),
        fits_from_step_s=round(least_step_s(sync, outer_s, together_s), 3),
        gflop_per_s=round(speed.flops / 1e9, 1),
    )
    return speed
