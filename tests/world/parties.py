"""Learners and syncers of the simulated world: the production exchange and service, with toy training. asyncio.

The "training" moves a learner's values towards a target that all share, with some noise of its own; what matters
is when it publishes and adopts, and that is the production `Rounds` and `Exchange`. The training loop sleeps for
its steps and for nothing else.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.run import LearnerReport, Phase
from diloco.pipeline.settings import SyncerProcess
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.service import SyncerService
from diloco.workers.exchange.joining import Joining
from diloco.workers.exchange.shared import Shared
from diloco.workers.exchange.work_queue import read_blocks
from diloco.workers.rounds import Publication, Rounds
from diloco_studies.virtual.virtual_time import VirtualClock, inline
from tests.samples import virtual_report
from tests.world.link import SLOW_S
from tests.world.plan import BLOCKS, LEASE_S, LIVENESS_S, SHARD_BLOCKS, STEPS_A_BLOCK

LEAVE_S = 4.0
DRAIN_S = 6.0
SHUTDOWN_S = 10.0
INITIAL = 0.1
"""Value of every parameter at the start; around 0 a delta after long training would be taken for absurd."""
LEARNING_RATE = np.float32(0.1)
TARGETS = LEARNING_RATE * (1 + 0.5 * np.sin(np.arange(20) * np.linspace(1, 4, 64)[:, None])).astype(np.float32)
"""Noisy targets (64, elements), all around 1: a step goes a tenth of the way to one of them."""


class Party:
    """A process of the world: its connection and its main task."""

    def __init__(self, world: Any, name: str, life: int, skew_s: float) -> None:
        self.world, self.name, self.life = world, name, life
        self.unit = name
        """What is started again where this is killed: a learner with all of its ranks."""
        self.link = world.link(name)
        self.clock = VirtualClock(skew_s)
        self.task: asyncio.Task[None] | None = None
        self.alive = True
        """Until it was killed, or ended in order."""

    def start(self, work: Callable[[], Any]) -> None:
        """Begin."""
        self.task = asyncio.get_running_loop().create_task(work())

    def kill(self) -> None:
        """As SIGKILL: from now on nothing it says is heard."""
        self.alive = False
        self.link.dead = True
        if self.task is not None:
            self.task.cancel()

    def pause(self, lasts_s: float) -> None:
        """As SIGSTOP for a while."""
        self.link.pause(lasts_s)

    def leave(self) -> None:
        """As SIGTERM."""

    async def paused(self) -> None:
        """Wait for the end of a pause, if there is one."""
        loop = asyncio.get_running_loop()
        while (left_s := self.link.paused_until - loop.time()) > 0:  # a pause may be prolonged
            await asyncio.sleep(left_s)


class WorldLearner(Party):
    """One incarnation of a learner."""

    def __init__(self, world: Any, number: int, life: int) -> None:
        plan = world.plan
        super().__init__(world, f"learner-{number}", life, plan.skew_s[number % len(plan.skew_s)])
        self.incarnation = world.chance.hex(16, "incarnation", self.name, life)
        self.step_s = plan.step_s[number % plan.learners]
        self.step_tokens = plan.step_tokens[number % plan.learners]
        self.stop = False
        self.left: bool | None = None
        """How its leave went, once it is over."""
        self.rounds = Rounds(world.layout, world.spec.sync)
        self.values: list[npt.NDArray[np.float32]] = []
        self.joining = Joining(self.link, self.clock, self.name, self.incarnation, self.report, offload=inline)  # type: ignore[arg-type]

    def report(self, left: bool) -> LearnerReport:
        """What it says about itself."""
        return virtual_report(self.rounds, self.name, self.incarnation, self.step_s, left)

    def leave(self) -> None:
        """As SIGTERM."""
        self.stop = True

    async def live(self) -> None:
        """Join, train until the run drains or it is told to stop, leave."""
        world = self.world
        self.values = [np.full(f.elements, INITIAL, np.float32) for f in world.layout.fragments]
        exchange = await self.joining.join(world.spec, world.layout, lambda p: self.values[p].copy())
        shared = exchange.shared
        running = asyncio.create_task(exchange.work())
        if self._adopt(shared):
            exchange.reporting.soon()
        shared.shards_wanted = BLOCKS, SHARD_BLOCKS
        exchange.claims.want()
        order: Iterator[tuple[int, int]] | None = None
        try:
            while not (self.stop or (shared.state is not None and shared.state.phase is not Phase.RUNNING)):
                if running.done():
                    running.result()
                drawn = world.chance.integer("step", self.name, self.life, self.rounds.steps)
                await asyncio.sleep(self._step_takes_s(drawn))
                await self.paused()
                if order is None and not shared.shards.empty():
                    first = shared.shards.get_nowait()
                    order = read_blocks(shared, first, exchange.claims.finish, random.Random(self.incarnation))
                if order is not None and self.rounds.steps % STEPS_A_BLOCK == 0:
                    world.oracle.shards.read(*next(order))
                self.rounds.in_part(shared.state)
                self._train(drawn)
                adopted = self._adopt(shared)
                if shared.offer_again:
                    shared.offer_again = False
                    self.rounds.offer_again()
                publications = self.rounds.publications(shared.windows, shared.uploaded, shared.released)
                exchange.publishing.queue([self._made(one) for one in publications])
                if adopted:
                    exchange.reporting.soon()
            due = shared.state is not None and shared.state.phase is not Phase.RUNNING
            exchange.publishing.queue([self._made(one) for one in self.rounds.last(shared.windows, due)])
            self.left = await exchange.leave(LEAVE_S)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        self.alive = False

    def _step_takes_s(self, drawn: int) -> float:
        """Speeds vary, and now and then a step takes ten times as long."""
        stall = 10.0 if drawn % 100 == 0 else 1.0
        return self.step_s * stall * (0.7 + 0.6 * (drawn >> 32) / 2**32)

    def _train(self, drawn: int) -> None:
        for p, values in enumerate(self.values):
            values *= 1 - LEARNING_RATE
            values += TARGETS[(drawn >> 6 * p) % len(TARGETS), : len(values)]
        self.rounds.trained(self.step_tokens)

    def _adopt(self, shared: Shared) -> bool:
        arrived = sorted(shared.adoptions)
        for p in arrived:
            base = shared.adoptions.pop(p)
            self.world.oracle.adopted(self.name, base)
            self.values[p][:] = base.values
            self.rounds.adopt(base)
        return bool(arrived)

    def _made(self, publication: Publication) -> tuple[Publication, Callable[[], npt.NDArray[np.float32]]]:
        base = publication.base
        snapshot = self.values[base.fragment].copy()
        made = (base.fragment, self.name, self.incarnation, publication.serial)
        if self.world.poisons(made):
            snapshot[0] = np.nan
        self.world.oracle.published(made, self.world.oracle.wire_values(base.fragment, base.values, snapshot))
        return publication, lambda: snapshot


class WorldSyncer(Party):
    """One life of a syncer."""

    def __init__(self, world: Any, number: int, life: int) -> None:
        plan = world.plan
        super().__init__(world, f"syncer-{number}", life, plan.skew_s[-1 - number % len(plan.skew_s)])
        settings = SyncerProcess(
            syncer_id=f"{self.name}.{life}",
            lease_s=LEASE_S,
            liveness_s=LIVENESS_S,
            drain_s=DRAIN_S,
            shutdown_s=SHUTDOWN_S,
        )
        self._drawn = self._offloaded = 0
        self.stop = asyncio.Event()
        self.service = SyncerService(
            self.link,  # type: ignore[arg-type]  # a link is every method of a bus
            self.clock,
            settings,
            Metrics(),
            offload=self._offload,
            random_hex=self._hex,
        )

    def _hex(self, count: int) -> str:
        self._drawn += 1
        return self.world.chance.hex(2 * count, "nonce", self.name, self.life, self._drawn)

    async def _offload(self, work: Any, *args: Any) -> Any:
        self._offloaded += 1
        takes_s = self.world.merge_takes_s(self.name, self._offloaded)
        if takes_s > SLOW_S:
            self.link.slow(takes_s)
        await asyncio.sleep(takes_s)
        await self.paused()
        return work(*args)

    def leave(self) -> None:
        """As SIGTERM."""
        self.stop.set()

    @property
    def serves(self) -> bool:
        """Whether nothing keeps it from taking leases."""
        now, link = asyncio.get_running_loop().time(), self.link
        held_up = now < max(link.paused_until, link.cut_until) or self.stop.is_set()
        return self.alive and self.service.serving is not None and not held_up

    async def live(self) -> None:
        """Serve until the run is finished, or it is told to stop."""
        await self.service.run(self.stop)
        self.alive = False
