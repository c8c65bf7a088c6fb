"""How much of what learners train is merged: whole runs of the production service and exchange in virtual time.

    python -m tests.shares            every deployment, three seeds, a table
    python -m tests.shares outage     those whose names have this in them

Toy learners, out of phase, with steps that vary; merges and calls take a given time. No second of it is real, so that
the shares are those of an idle machine, whatever else this one does.
"""

import asyncio
import logging
import random
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.settings import SyncerProcess, SyncSettings
from diloco.pipeline.view.ledger import Totals, accounts, totals
from diloco.pipeline.view.ledger_inputs import read_ledger_inputs
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.service import SyncerService
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, run_virtual
from tests.virtual_run import RUN, VirtualLearner, VirtualRun

STEP_TOKENS = 10
"""Of a `VirtualLearner`."""


@dataclass(frozen=True)
class Deployment:
    """A run, by what decides how much of it is merged."""

    learners: int = 4
    fragments: int = 4
    steps: int = 600
    """Of each learner."""
    step_s: float = 0.4
    jitter: float = 0.1
    """Each step takes longer or shorter by up to this share."""
    in_phase: bool = False
    merge_s: float = 0.05
    slow_merges: tuple[float, float, float] | None = None
    """From when, until when, and how many times as long as others these take."""
    latency_s: float = 0.01
    """Of a call to the bus."""
    outage: tuple[float, float] | None = None
    """When all syncers go, and for how long."""
    sync: dict[str, Any] = field(default_factory=dict)


AFTER_RAMP = {"first_interval": 0}
DEPLOYMENTS = {
    "as in the lab: in phase, even steps, quick merges": Deployment(in_phase=True, jitter=0.0, merge_s=0.0),
    "an idle machine": Deployment(),
    "an idle machine, 250 steps": Deployment(steps=250),
    "an idle machine, after the ramp": Deployment(sync=AFTER_RAMP),
    "after the ramp, a round trip of two steps": Deployment(merge_s=0.4, sync=AFTER_RAMP),
    "a neighbour: steps vary by half, slow merges": Deployment(jitter=0.5, merge_s=0.3),
    "merges of ten steps": Deployment(merge_s=4.0, steps=1200),
    "five minutes": Deployment(steps=750),
    "five minutes, a minute without syncers": Deployment(steps=750, outage=(120.0, 60.0)),
    "five minutes, merges of 0.4 s": Deployment(steps=750, merge_s=0.4),
    "the same, 100 s of it ten times slower": Deployment(steps=750, merge_s=0.4, slow_merges=(100.0, 200.0, 10.0)),
}


@dataclass
class _Learner(VirtualLearner):
    deployment: Deployment = field(default_factory=Deployment)
    chance: random.Random = field(default_factory=random.Random)

    def connect(self) -> Bus:
        return _SlowBus(self.world, self.deployment.latency_s)

    async def step(self) -> None:
        await asyncio.sleep(self.step_s * (1 + self.deployment.jitter * (2 * self.chance.random() - 1)))


class _SlowBus(MemoryBus):
    def __init__(self, world: VirtualRun, latency_s: float = 0.0) -> None:
        super().__init__(RUN, world.clock, world.store)
        self._latency_s = latency_s

    async def _turn(self) -> None:
        await asyncio.sleep(self._latency_s)
        await super()._turn()


class _Run:
    def __init__(self, deployment: Deployment, seed: int) -> None:
        self._given, self._chance = deployment, random.Random(seed)
        tokens = deployment.learners * deployment.steps * STEP_TOKENS
        settings = SyncSettings(**{"fragments": deployment.fragments, "tokens": tokens} | deployment.sync)
        self._world = VirtualRun(settings.sync_spec())

    async def run(self) -> Totals:
        """To its end, and what became of its tokens."""
        given, world = self._given, self._world
        syncer = self._serve()
        learners = []
        for number in range(given.learners):
            chance = random.Random(self._chance.random())
            learner = _Learner(f"l{number}", world, given.step_s, f"{number:016x}", deployment=given, chance=chance)
            learners.append(learner.start())
            if not given.in_phase:
                await asyncio.sleep(given.step_s * self._chance.random())
        if given.outage is not None:
            await asyncio.sleep(given.outage[0])
            syncer.cancel()
            with suppress(asyncio.CancelledError):
                await syncer
            await asyncio.sleep(given.outage[1])
            syncer = self._serve()
        await asyncio.gather(syncer, *(learner.task for learner in learners if learner.task))
        bus, layout = _SlowBus(world), layout_of(world.spec.tensors)
        tape = [entry.record for entry in await bus.read_tape({0: "0"}, limit=100_000)]
        return totals(accounts(tape, await read_ledger_inputs(bus, len(layout.fragments), 5.0), layout), layout)

    def _serve(self) -> asyncio.Task[None]:
        bus, process = _SlowBus(self._world, self._given.latency_s), SyncerProcess(syncer_id="syncer")
        service = SyncerService(bus, VirtualClock(), process, Metrics(), offload=self._offload)
        return asyncio.create_task(service.run(asyncio.Event()))

    async def _offload(self, work: Any, *args: Any) -> Any:
        if getattr(work, "__name__", "") == "merge":
            await asyncio.sleep(self._merge_s(asyncio.get_running_loop().time()))
        return work(*args)

    def _merge_s(self, now: float) -> float:
        merge_s, slow = self._given.merge_s, self._given.slow_merges
        return merge_s * slow[2] if slow is not None and slow[0] <= now < slow[1] else merge_s


def totals_of(deployment: Deployment, seed: int = 0) -> Totals:
    """What becomes of a run's tokens."""
    return run_virtual(_Run(deployment, seed).run())


def main(names: list[str]) -> None:
    """Print the table."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for name, deployment in DEPLOYMENTS.items():
        if all(part in name for part in names):
            found = [totals_of(deployment, seed) for seed in range(1 if deployment.in_phase else 3)]
            shares = [f"{100 * one.merged / one.tokens:.1f}" for one in found]
            lost = (sum(one.lost[cause] / one.tokens for one in found) for cause in ("overwritten", "rejected"))
            told = " + ".join(f"{100 * share / len(found):.1f}" for share in lost)
            print(f"| {name} | {', '.join(shares)} | {told} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
