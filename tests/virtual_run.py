"""A whole run in virtual time: the production syncer service and exchange on the memory bus, toy training.

The "training" moves a learner's values towards a target of all ones, so that merged globals visibly converge.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.run import LearnerReport, Phase
from diloco.pipeline.messages.spec import Spec, SyncSpec, TensorSpec
from diloco.pipeline.settings import SyncerProcess, SyncSettings
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.service import SyncerService
from diloco.workers.exchange.joining import Joining
from diloco.workers.exchange.work_queue import read_blocks
from diloco.workers.rounds import Publication, Rounds
from diloco_studies.virtual.memory import MemoryBus, MemoryStore
from diloco_studies.virtual.virtual_time import VirtualClock, inline
from tests.samples import virtual_report

RUN = "virtual"


PLAIN = {
    "merge": "rda",
    "outer": "nesterov",
    "outer_momentum": 0.0,
    "outer_warmup": 0,
    "first_interval": 0,
    "doubling": 1,
}
"""The protocol without what changes in the course of a run."""


def sync_spec(**changes: Any) -> SyncSpec:
    settings = {"fragments": 2, "sync_interval": 4, "tokens": 4000, "chunk_bytes": 1024, "global_codec": "fp32"}
    settings |= PLAIN | changes
    return SyncSettings(**settings).sync_spec()


def spec_of(sync: SyncSpec) -> Spec:
    tensors = tuple(
        TensorSpec(name=f"t{i}", shape=(3 + i,), dtype="float32", rule="rda", fragment=i % sync.fragments)
        for i in range(2 * sync.fragments)
    )
    return Spec(sync=sync, tensors=tensors, trainer={})


@dataclass
class VirtualLearner:
    """Steps every `step_s`, each of 10 tokens; reads a block of data in each if told how many there are."""

    name: str
    world: "VirtualRun"
    step_s: float = 0.1
    incarnation: str = "0123456789abcdef"
    values: list[np.ndarray] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    left: bool = False
    longest_step_s: float = 0.0
    data: tuple[int, int] | None = None
    """(blocks in an epoch, blocks in a shard)"""
    read: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, block) in the order read."""
    stop: bool = False
    """Asked to leave."""

    def begin(self, elements: int) -> np.ndarray:
        """Initial values of a fragment."""
        return np.zeros(elements, np.float32)

    def report(self, left: bool) -> LearnerReport:
        return virtual_report(self.rounds, self.name, self.incarnation, self.step_s, left, 10 / self.step_s)

    def connect(self) -> Bus:
        """A connection of its own."""
        return MemoryBus(RUN, self.world.clock, self.world.store)

    @property
    def joined(self) -> bool:
        return hasattr(self, "exchange")

    async def live(self) -> None:
        """Join, train until the run drains, leave."""
        spec = self.world.spec
        layout = layout_of(spec.tensors)
        self.values = [self.begin(f.elements) for f in layout.fragments]
        self.rounds = Rounds(layout, spec.sync)
        self.bus = self.connect()
        given = self.bus, self.world.clock, self.name, self.incarnation, self.report
        self.joining = Joining(*given, offload=inline)
        self.exchange = await self.joining.join(spec, layout, lambda p: self.values[p].copy())
        self.adopt()
        running = asyncio.create_task(self.exchange.work())
        loop = asyncio.get_running_loop()
        try:
            blocks = await self.blocks() if self.data else None
            while not self.stop and not self.over:
                began = loop.time()
                if blocks:
                    self.read.append(next(blocks))
                await self.step()
                if running.done():
                    running.result()
                self.rounds.in_part(self.exchange.shared.state)
                self.train()
                self.adopt()
                if self.exchange.shared.offer_again:
                    self.exchange.shared.offer_again = False
                    self.rounds.offer_again()
                shared = self.exchange.shared
                for publication in self.rounds.publications(shared.windows, shared.uploaded, shared.released):
                    self.publish(publication)
                self.longest_step_s = max(self.longest_step_s, loop.time() - began)
            for publication in list(self.rounds.last(self.exchange.shared.windows, self.over)):
                self.publish(publication)
            self.left = await self.exchange.leave(20.0)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    @property
    def over(self) -> bool:
        """The run drains, or is finished."""
        state = self.exchange.shared.state
        return state is not None and state.phase is not Phase.RUNNING

    async def blocks(self) -> Iterator[tuple[int, int]]:
        """The order of blocks, once the first shard is here."""
        shared = self.exchange.shared
        shared.shards_wanted = self.data
        self.exchange.claims.want()
        while shared.shards.empty():
            await asyncio.sleep(0.01)
        return read_blocks(shared, shared.shards.get(), self.exchange.claims.finish, random.Random(self.incarnation))

    async def step(self) -> None:
        """The time that an inner step takes."""
        await asyncio.sleep(self.step_s)

    def train(self) -> None:
        for values in self.values:
            values += 0.1 * (1.0 - values)
        self.rounds.trained(10)

    def adopt(self) -> None:
        for p in sorted(self.exchange.shared.adoptions):
            base = self.exchange.shared.adoptions.pop(p)
            self.values[p][:] = base.values
            self.rounds.adopt(base)
            self.exchange.reporting.soon()

    def publish(self, publication: Publication) -> None:
        snapshot = self.values[publication.base.fragment].copy()
        self.exchange.publishing.queue([(publication, lambda: snapshot)])

    def start(self) -> "VirtualLearner":
        self.task = asyncio.create_task(self.live())
        return self

    async def kill(self) -> None:
        """As SIGKILL: nothing more is said or done."""
        assert self.task is not None
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


class VirtualRun:
    """A store, one syncer, and whatever learners a test starts. Use inside `run_virtual`."""

    def __init__(self, sync: SyncSpec | None = None, **settings: Any) -> None:
        self.clock = VirtualClock()
        self.store = MemoryStore()
        self.spec = spec_of(sync or sync_spec())
        self.bus = MemoryBus(RUN, self.clock, self.store)
        self.bus.use_spec(self.spec)
        self.settings = settings
        self.stop = asyncio.Event()
        self.syncer: asyncio.Task[None] | None = None
        self.service: SyncerService

    def start_syncer(self, skew_s: float = 0.0, **settings: Any) -> SyncerService:
        """Its wall clock, not the bus's, is `skew_s` ahead."""
        bus = MemoryBus(RUN, self.clock, self.store)
        process = SyncerProcess(**({"syncer_id": "syncer"} | self.settings | settings))
        self.service = SyncerService(bus, VirtualClock(skew_s), process, Metrics(), offload=inline)
        self.stop = asyncio.Event()
        self.syncer = asyncio.create_task(self.service.run(self.stop))
        return self.service

    async def stop_syncer(self) -> None:
        """As SIGTERM: it ends in order."""
        assert self.syncer is not None
        self.stop.set()
        await self.syncer

    async def kill_syncer(self) -> None:
        """As SIGKILL: nothing more is said or done."""
        assert self.syncer is not None
        self.syncer.cancel()
        with suppress(asyncio.CancelledError):
            await self.syncer

    async def heads(self) -> list[Head]:
        return [head for head in await self.bus.read_heads(range(self.spec.sync.fragments)) if head]

    async def tape(self) -> list[Any]:
        return [entry.record for entry in await self.bus.read_tape({0: "0"}, limit=100_000)]

    async def versions(self) -> list[int]:
        return [head.version for head in await self.heads()]

    async def until_version(self, version: int, timeout_s: float = 60.0) -> None:
        """Until every fragment has reached it."""
        async with asyncio.timeout(timeout_s):
            while (
                len(heads := await self.heads()) < self.spec.sync.fragments or min(h.version for h in heads) < version
            ):
                await asyncio.sleep(0.05)

    async def finish(self, *learners: VirtualLearner) -> None:
        """Wait for the run to end by itself."""
        assert self.syncer is not None
        async with asyncio.timeout(600):
            await asyncio.gather(self.syncer, *(learner.task for learner in learners if learner.task))


Kind = TypeVar("Kind", bound=VirtualLearner)


async def under_way(
    version: int, kind: type[Kind] = VirtualLearner, learners: int = 2, **changes: Any
) -> tuple[VirtualRun, list[Kind]]:
    """A run with a syncer and learners l0, l1 ..., once every fragment has reached a version; endless unless told."""
    world = VirtualRun(sync_spec(**{"tokens": 10**9, **changes}))
    world.start_syncer()
    party = [kind(f"l{i}", world, 0.1, f"{i:016x}") for i in range(learners)]
    for learner in party:
        learner.start()
    await world.until_version(version)
    return world, party


async def until_joined(*learners: VirtualLearner) -> None:
    async with asyncio.timeout(60):
        while not all(one.joined for one in learners):
            await asyncio.sleep(0.01)


async def end(*parties: VirtualLearner) -> None:
    for party in parties:
        await party.kill()
