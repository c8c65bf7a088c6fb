"""A learner whose model has become NaN does not use up the budget: the production service in virtual time."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from diloco.pipeline.clock import LoopClock
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.messages.run import Phase, SeenReport
from diloco.pipeline.view.status import build_status
from diloco.syncer.admission import Diverged
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.membership import RunWatch
from diloco.syncer.serving.lead import Lead
from diloco.workers.exchange import refused
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec


@pytest.fixture(autouse=True)
def nobody_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    """As learners that are made otherwise."""
    monkeypatch.setattr(refused, "HEALED_AFTER", math.inf)


class Poisoned(VirtualLearner):
    """Its values are NaN while this is so."""

    nan = True

    def train(self) -> None:
        super().train()
        if self.nan:
            for values in self.values:
                values[:] = np.nan


@pytest.mark.parametrize("restarted", [False, True])
@in_virtual_time
async def test_what_a_learner_that_is_nan_trains_is_counted_and_brings_the_run_no_further(restarted: bool) -> None:
    """From its third refusal on; also after another syncer took over, which notices by its own refusals."""
    world = VirtualRun(sync_spec(tokens=4000))
    world.start_syncer()
    party = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    bad = Poisoned("bad", world, 0.1, "b" * 16).start()
    if restarted:
        await world.until_version(8)
        await world.stop_syncer()
        before = await world.bus.read_state()
        assert before.set_aside > 0
        world.start_syncer()
    await world.finish(*party, bad)
    state = await world.bus.read_state()
    honest = sum(learner.rounds.tokens for learner in party)
    assert state.tokens == honest + bad.rounds.tokens, "all of it is counted as trained"
    assert bad.rounds.tokens - 400 * (1 + restarted) < state.set_aside < bad.rounds.tokens
    assert state.counted_tokens >= 4000
    assert honest > 3200 - 400 * restarted


@in_virtual_time
async def test_a_fast_one_that_is_nan_has_nobody_merge_after_every_step() -> None:
    """Once it is suspected its headers ask for no merge: the others make whole intervals."""
    world = VirtualRun(sync_spec(tokens=10**6, sync_interval=8))
    world.start_syncer()
    party = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    await world.until_version(8)
    bad = Poisoned("bad", world, 0.01, "b" * 16).start()
    await asyncio.sleep(10.0)
    before = {head.fragment: head.version for head in await world.heads()}
    await asyncio.sleep(30.0)
    commits = [one for one in await world.tape() if isinstance(one, Committed)]
    late = [part.steps for one in commits if one.version > before[one.fragment] for part in one.contributions]
    assert len(late) > 100
    assert np.median(late) >= 7
    await end(*party, bad)


@in_virtual_time
async def test_its_tokens_count_again_once_something_of_it_is_merged_and_nothing_is_taken_back(tmp_path) -> None:
    """Progress never falls, and a checkpoint knows what was set aside."""
    world = VirtualRun(sync_spec(tokens=10**6), checkpoint_dir=str(tmp_path))
    world.start_syncer()
    honest = VirtualLearner("l0", world, 0.1, "0" * 16).start()
    bad = Poisoned("bad", world, 0.1, "b" * 16).start()
    await world.until_version(10)
    bad.nan = False
    seen, aside = [0], [0]
    for _ in range(40):
        await asyncio.sleep(0.5)
        state = await world.bus.read_state()
        seen.append(state.counted_tokens)
        aside.append(state.set_aside)
    assert seen == sorted(seen)
    assert 0 < aside[-1] == aside[20], "it counts again"
    await end(honest, bad)
    await world.stop_syncer()
    assert load_checkpoint(tmp_path).state.set_aside == aside[-1]
    resumed = VirtualRun(sync_spec(tokens=10**6), resume=str(tmp_path))
    resumed.start_syncer()
    await resumed.until_version(0)
    assert (await resumed.bus.read_state()).counted_tokens == load_checkpoint(tmp_path).state.counted_tokens


async def test_a_report_that_falls_and_rises_takes_back_nothing_that_counts() -> None:
    """Of a learner that has diverged: what others train goes on to count, and progress is never below what it was."""
    diverged, watch = Diverged(), RunWatch(samples.sync_spec(), 1.0, 1.0)
    for _ in range(3):
        diverged.refused("bad", 0)
    sync = samples.sync_spec(tokens=10**6)
    given = {"bus": None, "clock": LoopClock(), "watch": watch, "layout": None, "sync": sync, "diverged": diverged}
    lead = Lead(cast(Any, SimpleNamespace(**given)))
    state = samples.run_state(phase=Phase.CLOSING, budget_tokens=10**6)
    counted = []
    for honest, bad in ((1000, 0), (2000, 10**9), (3000, 0), (4000, 10**9), (5000, 10**8), (6000, 10**9)):
        reports = samples.report("l0", tokens=honest), samples.report("bad", tokens=bad)
        watch.reports = [SeenReport(report=one, age_s=0.1) for one in reports]
        state = await lead._counted(state)
        counted.append(state.counted_tokens)
        progress = build_status("run", None, state, watch.reports, [], None, (), 1.0)["progress"]
        assert progress == counted[-1] / 10**6
    assert counted == sorted(counted)
    assert counted[1::2] == [2000, 4000, 6000]


def test_two_refusals_are_none_too_many_and_a_merge_ends_it() -> None:
    """In one fragment: of many each may be refused once in a round. Names are not remembered without end."""
    diverged = Diverged()
    for fragment in range(8):
        for _ in range(2):
            diverged.refused("l0", fragment)
    assert not diverged.learners
    diverged.refused("l0", 3)
    assert diverged.learners == {"l0"}
    diverged.merged("l0")
    diverged.merged("unknown")
    assert not diverged.learners
    for n in range(10_000):
        diverged.refused(f"l{n}", 0)
    assert len(diverged._times) == 4096
    assert samples.run_state(tokens=100, set_aside=30).counted_tokens == 70
