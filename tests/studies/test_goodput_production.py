"""The simulator's window driver beside whole runs of the production service and exchange, in virtual time."""

import asyncio
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pytest

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.messages.spec import SyncSpec
from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.job import Stops, Timeline
from diloco_studies.goodput.parties import bare
from diloco_studies.goodput.windows import SETTLED, Follower, Learner
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import run_virtual
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, sync_spec

FRAGMENTS, INTERVAL = 2, 8
DURATION_S = 590.0
"""As long as the syncer keeps the whole tape."""
NEVER = (DURATION_S, DURATION_S)


class SilentBus(MemoryBus):
    """Answers nothing during a pause."""

    pause: tuple[float, float] = NEVER

    async def _turn(self) -> None:
        began_s, ended_s = self.pause
        now = asyncio.get_running_loop().time()
        if began_s <= now < ended_s:
            await asyncio.sleep(ended_s - now)
        await super()._turn()


@dataclass
class PausingLearner(VirtualLearner):
    """Stands still, and says nothing, from one time to another."""

    pause: tuple[float, float] = NEVER

    def connect(self) -> Bus:
        bus = SilentBus(RUN, self.world.clock, self.world.store)
        bus.pause = self.pause
        return bus

    async def step(self) -> None:
        began_s, ended_s = self.pause
        start_s = self.world.clock.now()
        await asyncio.sleep(self.step_s)
        if start_s < ended_s and self.world.clock.now() > began_s:
            await asyncio.sleep(ended_s - max(start_s, began_s))


def produced(steps_s, pause, **sync):
    """(learners a merge, outer steps an hour, overwritten share) of production code on the memory bus."""

    async def main():
        world = VirtualRun(sync_spec(tokens=10**12, **sync))
        world.start_syncer()
        learners = [
            PausingLearner(f"l{i}", world, step_s, f"{i:016x}", pause=NEVER if i else pause)
            for i, step_s in enumerate(steps_s)
        ]
        for learner in learners:
            learner.start()
        await world.until_version(SETTLED + 1, DURATION_S)
        before = overwritten_and_trained(learners)
        await asyncio.sleep(DURATION_S - world.clock.now())
        after = overwritten_and_trained(learners)
        merges = [r for r in await world.tape() if isinstance(r, Committed) and r.version > SETTLED + 1]
        world.stop.set()
        for learner in learners:
            await learner.kill()
        await world.syncer
        elements = sum(tensor.elements for tensor in world.spec.tensors)
        overwritten, trained = (late - early for early, late in zip(before, after, strict=True))
        return merges, overwritten / elements / trained

    merges, overwritten = run_virtual(main())
    span_s = max(r.unix_s for r in merges) - min(r.unix_s for r in merges)
    return fmean(len(r.contributions) for r in merges), 3600 * (len(merges) - 1) / span_s, overwritten


def overwritten_and_trained(learners):
    counts = [learner.rounds.counts for learner in learners]
    return sum(c.overwritten for c in counts), sum(c.tokens for c in counts)


def simulated(steps_s, pause, **sync):
    """The same of the simulator, on a network as quick as the memory bus."""
    constants = Constants(link=1e15, latency=0.0, merge_rate=1e18, grace_gamma=sync["grace_gamma"])
    lines = [
        Timeline(Stops(np.array([a]), np.array([b])), DURATION_S) for a, b in [pause, *[NEVER] * (len(steps_s) - 1)]
    ]
    learners = [Learner(line, step_s) for line, step_s in zip(lines, steps_s, strict=True)]
    follower = Follower(
        constants, learners, bare(SyncSpec, first_interval=0, doubling=1, **sync), np.random.default_rng(0), waits=False
    )
    follower.run(DURATION_S)
    found = follower.tally.summary(sync["fragments"])
    return found["mean_participants"], found["outer_steps_per_hour"], found["overwritten"]


@pytest.mark.parametrize(
    "gamma", [pytest.param(0.0, marks=pytest.mark.slow, id="no grace"), pytest.param(0.8, id="grace")]
)
@pytest.mark.parametrize(
    ("steps_s", "pause", "quorum"),
    [
        pytest.param((1.0, 1.0, 1.0, 1.18), NEVER, 1, marks=pytest.mark.slow, id="one slower"),
        pytest.param((1.0, 1.05, 1.11, 1.19), NEVER, 1, id="all differ"),
        pytest.param((1.0, 1.05, 1.11, 1.19), NEVER, 4, marks=pytest.mark.slow, id="all, K = M"),
        pytest.param((1.0, 1.6), NEVER, 1, marks=pytest.mark.slow, id="far apart"),
        pytest.param((1.0, 1.01, 1.02), (150.3, 350.7), 1, marks=pytest.mark.slow, id="one pauses"),
        pytest.param((1.0, 1.01, 1.02), (150.3, 350.7), 3, id="one pauses, K = M"),
    ],
)
def test_the_simulator_decides_what_production_decides(steps_s, pause, quorum, gamma):
    """Learners a merge within 0.05, outer steps an hour within 1.5 %, the overwritten share within one point."""
    sync = {
        "fragments": FRAGMENTS,
        "sync_interval": INTERVAL,
        "quorum": quorum,
        "overlap_steps": 2,
        "grace_gamma": gamma,
    }
    participants, outer_steps, overwritten = produced(steps_s, pause, **sync)
    ours = simulated(steps_s, pause, **sync)
    assert ours[0] == pytest.approx(participants, abs=0.05)
    assert ours[1] == pytest.approx(outer_steps, rel=0.015)
    assert ours[2] == pytest.approx(overwritten, abs=0.01)
