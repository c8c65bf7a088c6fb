"""Which deltas are too long to be true: measured by what the fragment's merges were made of."""

from pathlib import Path

import numpy as np
import pytest

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed, RefusalReason, Rejected
from diloco.syncer.admission import Offer
from diloco.syncer.merging.fragment import MERGES_NEEDED, Delta, FragmentState
from diloco.syncer.merging.merge import delta_norms
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

SIZE = 1000


def fragment() -> FragmentState:
    """Values of length 10, which hardly move."""
    layout = layout_of([samples.tensor("t", (SIZE,))]).fragments[0]
    return FragmentState(layout, samples.sync_spec(fragments=1, outer_lr=1e-6), 0, bytes(16), along(10.0), None)


def along(length: float) -> np.ndarray:
    return np.full(SIZE, length / SIZE**0.5, np.float32)


def judge(state: FragmentState, offer: Offer, values: np.ndarray) -> Delta | tuple[RefusalReason, str]:
    """With its norms, as its owner gives them."""
    return state.judge(offer, values, delta_norms(state.layout, values))


def merged(state: FragmentState, learners: int, length: float) -> None:
    """A merge of deltas of this length."""
    deltas = []
    for number in range(learners):
        judged = judge(state, Offer("0-0", samples.header(f"l{number}", base_version=state.version)), along(length))
        assert isinstance(judged, Delta), judged
        deltas.append(judged)
    state.advance(state.merge(deltas, []))


@pytest.mark.parametrize("learners", [1, 2, 4, 8, 64])
def test_deltas_that_grow_are_merged_however_many_learners_began(learners: int) -> None:
    """A run's first delta is of one step at a rate that still warms up: three thousandths of what follows."""
    state = fragment()
    for length in (0.001, 3.0, 3.3, 2.8, 3.1, 2.9):
        merged(state, learners, length)


def test_many_merges_before_the_rate_warms_up_do_not_make_all_later_deltas_absurd() -> None:
    """A run of fast steps makes dozens of merges before the first rate above nearly nothing."""
    state = fragment()
    for length in [0.001] * 40 + [3.0] * 40:
        merged(state, 2, length)


@pytest.mark.parametrize("learners", [1, 8])
def test_a_delta_a_hundred_times_as_long_as_usual_is_refused(learners: int) -> None:
    """Once there is a usual length; before, one a hundred times as long as the fragment."""
    state = fragment()
    for merges in range(2 * MERGES_NEEDED):
        most = 100 * (0.3 if merges >= MERGES_NEEDED else 10.0)
        offer = Offer("0-0", samples.header(base_version=state.version))
        refused = judge(state, offer, along(1.1 * most))
        assert refused[0] is RefusalReason.ABSURD_NORM
        assert isinstance(judge(state, offer, along(0.9 * most)), Delta)
        merged(state, learners, 0.3)


def test_a_stale_delta_is_judged_and_told_as_it_was_sent() -> None:
    """However long it becomes by what the global has moved since: neither tape nor usual length shows that."""
    state = fragment()
    state.sync = state.sync.model_copy(update={"outer_lr": 1.0, "outer_momentum": 0.0})
    for _ in range(MERGES_NEEDED):
        merged(state, 1, 0.05)
    late = judge(state, Offer("0-0", samples.header("late", base_version=state.version)), along(0.05))
    merged(state, 1, 4.0)
    assert isinstance(late, Delta)
    rebased = state.rebased(late)
    assert rebased.norm == pytest.approx(3.95, rel=1e-4)
    assert state.rebased(rebased) is rebased
    outcome = state.merge([rebased], [])
    (part,) = outcome.contributions
    assert part.rebased
    assert part.norm == late.norm
    state.advance(outcome)
    hostile = judge(state, Offer("0-0", samples.header(base_version=state.version - 1)), along(15.0))
    assert hostile[0] is RefusalReason.ABSURD_NORM


def test_who_does_not_know_the_version_before_merges_a_stale_delta_as_it_is() -> None:
    """A new owner has read the present version alone; from its own first merge on it knows. A fresh delta stays."""
    state = FragmentState(
        fragment().layout,
        samples.sync_spec(fragments=1, outer_lr=1.0, outer_momentum=0.0),
        7,
        bytes(16),
        along(10.0),
        None,
    )
    stale = judge(state, Offer("0-0", samples.header("late", base_version=6)), along(1.0))
    assert isinstance(stale, Delta)
    assert state.rebased(stale) is stale
    outcome = state.merge([stale], [])
    assert not outcome.contributions[0].rebased
    state.advance(outcome)
    stale, fresh = (judge(state, Offer("0-0", samples.header(base_version=base)), along(1.0)) for base in (7, 8))
    assert isinstance(stale, Delta)
    assert isinstance(fresh, Delta)
    assert state.rebased(stale).norm < 1e-3
    assert state.rebased(fresh) is fresh


@in_virtual_time
async def test_who_takes_a_fragment_over_or_resumes_it_judges_by_what_was_merged_before(tmp_path: Path) -> None:
    """Its first merges take none that is a hundred times as long as the fragment, as little as the one before did."""

    class Diverged(VirtualLearner):
        def train(self) -> None:
            for values in self.values:
                values[:] = 60.0  # within a hundred times the fragment's own length
            self.rounds.trained(10)

    async def judged(world: VirtualRun, party: list[VirtualLearner]) -> None:
        before = min(await world.versions())
        bad = Diverged("bad", world, 0.1, "b" * 16).start()
        await world.until_version(before + 6)
        await bad.kill()
        tape = await world.tape()
        merged = {part.learner for one in tape if isinstance(one, Committed) for part in one.contributions}
        assert merged == {"l0", "l1"}
        assert {one.reason for one in tape if isinstance(one, Rejected)} >= {RefusalReason.ABSURD_NORM}
        assert max(abs(values).max() for values in party[0].values) < 3
        await world.stop_syncer()

    sync = sync_spec(tokens=10**9)
    world = VirtualRun(sync, checkpoint_dir=str(tmp_path))
    world.start_syncer()
    party = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    await world.until_version(MERGES_NEEDED + 2)
    await world.stop_syncer()
    world.start_syncer()
    await judged(world, party)
    await end(*party)
    resumed = VirtualRun(sync, resume=str(tmp_path))
    resumed.start_syncer()
    party = [VirtualLearner(f"l{i}", resumed, 0.1, f"{i + 2:016x}").start() for i in range(2)]
    await resumed.until_version(MERGES_NEEDED)
    await judged(resumed, party)
    await end(*party)
