"""The grace of whole runs on a slow link: the production service and exchange in virtual time, beside the simulator."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.codec import Encoded
from diloco.pipeline.ramps import interval_at
from diloco.syncer import session
from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.job import Stops, Timeline
from diloco_studies.goodput.parties import bare
from diloco_studies.goodput.windows import SETTLED, Follower, Learner
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time, run_virtual
from tests import slow_beyond
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, end, sync_spec

TAU, GAMMA, INTERVAL = 2, 0.8, 8
UNTIL_S = 590.0
"""As long as the syncer keeps the whole tape."""
CUT_S = (20.0, 50.0)
STEPS_S = (1.0, 1.03, 1.57)
SIZES = {1: (1.0,), 2: (8 / 9, 10 / 9)}
"""Elements of so many fragments; the mean is 1."""


class SlowLink(MemoryBus):
    """A learner's: a global of mean size takes `pull_s` to come, and nothing else takes any time."""

    pull_s = 0.0
    sizes: tuple[float, ...] = ()

    async def read_chunks(self, key: str, *args: Any, **more: Any) -> list[bytes | memoryview]:
        chunks: Sequence[Encoded | memoryview] = await super().read_chunks(key, *args, **more)
        if chunks and ":global:" in key:
            await asyncio.sleep(self.pull_s * self.sizes[int(key.split(":global:")[1].split(":")[0])])
        return chunks  # type: ignore[return-value]  # as they came


@dataclass
class FarLearner(VirtualLearner):
    """One at the end of a slow link."""

    pull_s: float = 0.0

    def connect(self) -> Bus:
        bus = SlowLink(RUN, self.world.clock, self.world.store)
        bus.pull_s, bus.sizes = self.pull_s, SIZES[self.world.spec.sync.fragments]
        return bus


def produced(pulls_s: Sequence[float], fragments: int = 2) -> tuple[list[Committed], list[float]]:
    """(commits after the first ones, each learner's reported pull) of a run of three, the third a slower one."""

    async def main() -> tuple[list[Committed], list[float]]:
        given = {"fragments": fragments, "sync_interval": INTERVAL, "overlap_steps": TAU, "grace_gamma": GAMMA}
        world = VirtualRun(sync_spec(tokens=10**12, **given))
        world.start_syncer(skew_s=7.0)  # clocks of machines need not agree
        learners = [
            FarLearner(f"l{i}", world, step_s, f"{i:016x}", pull_s=pull_s)
            for i, (step_s, pull_s) in enumerate(zip(STEPS_S, pulls_s, strict=True))
        ]
        for learner in learners:
            learner.start()
        await asyncio.sleep(UNTIL_S)
        reports = sorted(await world.bus.read_reports(), key=lambda seen: seen.report.learner)
        commits = [r for r in await world.tape() if isinstance(r, Committed) and r.version > SETTLED]
        world.stop.set()
        await end(*learners)
        await world.syncer
        return commits, [seen.report.pull_s for seen in reports]

    return run_virtual(main())


def simulated(pull_s: float) -> dict[str, float]:
    """The same of the simulator, where all learners have the same link."""
    params = 1e6
    sizes = {"params": params, "wire_bits": 1, "global_bits": 32, "link": params * 32 / pull_s}
    constants = Constants(latency=0.0, merge_rate=1e18, grace_gamma=GAMMA, **sizes)
    sync = bare(
        SyncSpec,
        fragments=1,
        sync_interval=INTERVAL,
        quorum=1,
        overlap_steps=TAU,
        grace_gamma=GAMMA,
        first_interval=0,
        doubling=1,
    )
    nothing = Timeline(Stops(np.array([UNTIL_S]), np.array([UNTIL_S])), UNTIL_S)
    follower = Follower(constants, [Learner(nothing, s) for s in STEPS_S], sync, np.random.default_rng(0), waits=False)
    follower.run(UNTIL_S)
    return follower.tally.summary(1)


@pytest.mark.parametrize("pull_s", slow_beyond(1, [2.1, 1.7]))
def test_a_grace_leaves_the_time_in_which_learners_pull_the_global(pull_s: float, monkeypatch: Any) -> None:
    """No window is open longer than gamma of what is left of tau steps, and some are for as long; learners say why.

    Intervals are as planned here. Where they are stretched, tau is (`test_round_trips.py`), and fragments meet.
    """
    monkeypatch.setattr(session, "stretched", lambda sync, version, _: interval_at(sync, version))
    commits, reported = produced([pull_s] * 3)
    assert reported == pytest.approx([pull_s] * 3, rel=0.01)
    over = [c for c in commits if len(c.contributions) < 3]
    assert over, "some windows wait for the slow one in vain"
    for commit in commits:
        slack_s = (
            TAU * STEPS_S[2] - SIZES[2][commit.fragment] * pull_s
        )  # a quorum of one takes no time, nor does a merge
        assert commit.grace_s <= GAMMA * slack_s + 0.02
        if commit in over:
            assert commit.grace_s == pytest.approx(GAMMA * slack_s, abs=0.02)


def test_one_slow_link_of_three_shortens_no_grace() -> None:
    """The median counts: a learner that pulls for long, or says so, costs the others no member."""
    (usual, _), (one_slow, reported) = produced([0.1, 0.1, 0.1]), produced([0.1, 3.0, 0.1])
    assert reported[1] > 2.0
    assert max(c.grace_s for c in one_slow) >= max(c.grace_s for c in usual) - 0.05


@pytest.mark.parametrize("pull_s", slow_beyond(1, [1.9, 0.2, 1.3, 1.7, 2.3]))
def test_the_simulator_counts_pulls_as_production_does(pull_s: float) -> None:
    """Learners a merge and the grace spent are alike, from links that leave all of the grace to such that leave little.

    Speeds that beat slowly make both means depend on the phase in which learners began: hence the tolerances.
    """
    commits, _ = produced([pull_s] * 3, fragments=1)
    ours = simulated(pull_s)
    assert ours["mean_participants"] == pytest.approx(fmean(len(c.contributions) for c in commits), abs=0.25)
    assert ours["mean_grace_s"] == pytest.approx(fmean(c.grace_s for c in commits), abs=0.15)


@dataclass
class CutOffLearner(FarLearner):
    """One that no global reaches for a while."""

    def connect(self) -> Bus:
        bus = super().connect()
        read = bus.read_chunks

        async def cut(key: str, *args: Any, **more: Any) -> list[bytes | memoryview]:
            if ":global:" in key and CUT_S[0] <= self.world.clock.now() < CUT_S[1]:
                raise BusUnavailable("cut off")
            return await read(key, *args, **more)

        bus.read_chunks = cut  # type: ignore[method-assign]
        return bus


@in_virtual_time
async def test_an_outage_is_no_part_of_a_pull() -> None:
    """What comes only when the bus is back says nothing of the link: the grace is what it was before."""
    world = VirtualRun(sync_spec(tokens=10**12))
    world.start_syncer()
    learner = CutOffLearner("l0", world, 0.1, "0" * 16, pull_s=0.3)
    learner.start()
    before: list[float] = []
    while world.clock.now() < CUT_S[1] + 30.0:
        await asyncio.sleep(1.0)
        before.append((await world.bus.read_reports())[0].report.pull_s)
    assert (await world.versions())[0] > 10
    assert learner.exchange.member.outages.count > 3, "it was cut off"
    assert max(before) < 0.7, "at most one pull waits for the other fragment's"
    await learner.kill()
