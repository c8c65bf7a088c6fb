"""The lab's outer steps and its fates of stale deltas, each against numbers worked out by hand."""

import numpy as np
import pytest

from diloco.pipeline.fragments import layout_of
from diloco.syncer.admission import Offer
from diloco.syncer.merging.fragment import Delta, Draft, FragmentState
from diloco.syncer.merging.merge import delta_norms
from diloco_studies.quality.fragment import LabFragment, Stale
from diloco_studies.quality.outer import RULES, Memory, Merge
from diloco_studies.quality.settings import LabRun
from tests import samples


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def steps(name: str, theta: np.ndarray, *ds: np.ndarray, **told) -> list[list[float]]:
    """Values after each of these pseudogradients."""
    given = {"lr": 1.0, "mu": 0.5, "delay": 2, "spread": 1.0, "layout": LAYOUT, **told}
    memory: Memory = {}
    found = []
    for step, d in enumerate(ds):
        before = d.copy(), theta.copy()
        after, memory = RULES[name](Merge(theta, d, step, **given), memory)
        assert after.dtype == np.float32
        assert (d == before[0]).all()
        assert (theta == before[1]).all()
        theta = after
        found.append(theta.tolist())
    return found


def test_delayed_nesterov_gathers_and_then_goes_further():
    """Momentum 3 = 1 + 2 and then 3.5 = 3 / 2 + 2, each with half of it every second step."""
    assert steps("delayed", f32(10), f32(1), f32(2), f32(1), f32(1)) == [[9.0], [5.5], [4.5], [1.75]]


def test_without_a_delay_it_is_nesterov():
    """Two steps of it; agreement is too where pseudogradients are alike, but for its first step."""
    theta, momentum, d = f32(10, -3), f32(0, 0), f32(1, 2)
    found = steps("delayed", theta.copy(), d, d, delay=1, lr=0.7, mu=0.9)
    for values in found:
        momentum = 0.9 * momentum + d
        theta = theta - 0.7 * (d + 0.9 * momentum)
        assert values == pytest.approx(theta.tolist())
    first, second = steps("agreement", f32(10, -3), d, d, mu=0.9)
    assert first == [9.0, -5.0]
    assert second == pytest.approx([9 - 1 - 0.9 * 1.9, -5 - 2 - 0.9 * 3.8])


def test_momentum_is_as_large_as_successive_steps_agree():
    """A cosine of 0.6 makes 0.8 to 0.48; a step back has none, and forgets what was gathered."""
    found = steps("agreement", f32(0, 0), f32(1, 0), f32(0.6, 0.8), f32(-1, 0), f32(0, 1), mu=0.8)
    assert found[0] == [-1.0, 0.0]
    assert found[1] == pytest.approx([-1 - 1.1184, -1.184])
    assert found[2] == pytest.approx([-2.1184 + 1, -1.184])
    assert found[3] == pytest.approx([-1.1184, -2.184])
    assert steps("agreement", f32(1), f32(0), f32(0)) == [[1.0], [1.0]]


@pytest.mark.parametrize(("spread", "rate"), [(1.0, 1.0), (2.0, 1.0), (6.0, 3.0)])
def test_deltas_that_disagree_are_extrapolated(spread, rate):
    """By half of what their squared lengths are of their mean's, never less than the mean itself."""
    assert steps("extrapolated", f32(10), f32(2), spread=spread, mu=0.0) == [[10 - 2 * rate]]


def test_schedule_free_is_between_the_last_and_the_mean():
    """z = 8, 7, 6; their means 8, 7.5, 7; half of each."""
    assert steps("schedule-free", f32(10), f32(2), f32(1), f32(1)) == [[8.0], [7.25], [6.5]]


LAYOUT = layout_of([samples.tensor("t", (2, 2), rule="mean"), samples.tensor("e", (2, 1))]).fragments[0]


def fragment(books: Stale | None = None, **told) -> LabFragment:
    sync = samples.sync_spec(fragments=1, outer_momentum=told.pop("mu", 0.0), outer_warmup=told.pop("warmup", 0))
    state = LAYOUT, sync, 0, bytes(16), np.full(6, 10, np.float32), None
    return LabFragment(LabRun(**{"outer": "nesterov"} | told), books or Stale(), *state)


def delta(learner: str, base: int, values: np.ndarray, steps: int = 4) -> Delta:
    offer = Offer("0-0", samples.header(learner, base_version=base, tokens=100, steps=steps))
    return Delta(offer, values, delta_norms(LAYOUT, values))


def every(value: float) -> np.ndarray:
    return np.full(6, value, np.float32)


@pytest.mark.parametrize(("fate", "after"), [(None, 6.5), ("drop", 7.0), ("keep", 5.5)])
def test_what_becomes_of_a_stale_delta(fate, after):
    """Global 10, then 8. From 10 to 6 is a step of 4, kept or left out, or of 2 from 8; the other learner's is of 1."""
    books = Stale()
    state = fragment(books, stale=fate)
    state.advance(state.merge([delta("a", 0, every(2.0))], []))
    deltas = [state.rebased(one) for one in (delta("a", 1, every(1.0)), delta("b", 0, every(4.0)))]
    for _ in range(2):  # a refused commit changes nothing, and counts nothing
        merged = state.merge(deltas, [])
        assert merged.theta.tolist() == pytest.approx([after] * 6)
        assert books.deltas == 0
    assert len(merged.contributions) == (1 if fate == "drop" else 2)
    state.advance(merged)
    assert books.deltas == 1
    assert books.dropped_tokens[0] == (100 if fate == "drop" else 0)


@pytest.mark.parametrize(("told", "after"), [({}, 6.5), ({"stale": "drop"}, 7.0), ({"stale": "keep"}, 5.5)])
def test_what_was_summed_while_others_were_awaited_does_not_show(told, after):
    """Production sums deltas up as they come, before it is known what becomes of them."""
    state = fragment(**told)
    state.advance(state.merge([delta("a", 0, every(2.0))], []))
    deltas = [state.rebased(one) for one in (delta("b", 0, every(4.0)), delta("a", 1, every(1.0)))]
    draft = Draft(LAYOUT, state.sync)
    draft.sum.add([one.values for one in deltas], [one.norms for one in deltas], [1.0, 1.0])
    assert state.merge(deltas, [], draft).theta.tolist() == pytest.approx([after] * 6)


def test_a_rule_takes_over_a_sum_that_was_begun():
    """The same as without."""
    found = []
    for begun in (False, True):
        state = fragment(outer="agreement", mu=0.5)
        deltas = [delta(name, 0, every(value)) for name, value in (("a", 1.0), ("b", 3.0))]
        draft = Draft(LAYOUT, state.sync)
        if begun:
            draft.sum.add([deltas[0].values], [deltas[0].norms], [1.0])
        draft.prepare(0.5)
        merged = state.merge(deltas, [], draft)
        found.append((merged.theta.tobytes(), merged.digest))
        assert not draft.momentum.any()
    assert found[0] == found[1]


def test_stale_deltas_are_merged_where_there_are_no_others():
    """Of a run that drains: nothing would be left to merge."""
    state = fragment(stale="drop")
    state.advance(state.merge([delta("a", 0, every(2.0))], []))
    assert state.merge([delta("b", 0, every(4.0))], []).theta.tolist() == [4.0] * 6


def test_off_it_is_production_to_the_bit():
    """Two merges with momentum and RDA, values and momentum."""
    random = np.random.default_rng(1)
    ours = fragment(mu=0.9)
    theirs = FragmentState(LAYOUT, ours.sync, 0, bytes(16), ours.theta.copy(), None)
    for version in range(2):
        deltas = [delta(name, version, random.normal(size=6).astype(np.float32)) for name in "abc"]
        for state in (ours, theirs):
            state.advance(state.merge(deltas, []))
        assert ours.theta.tobytes() == theirs.theta.tobytes()
        assert ours.momentum.tobytes() == theirs.momentum.tobytes()


@pytest.mark.parametrize("outer", RULES)
def test_a_rule_begins_after_the_warm_up_and_only_what_is_committed_counts(outer):
    """Twice the mean; then its own step, the same however often it is tried; the mean again of short last deltas."""
    state = fragment(outer=outer, warmup=2, mu=0.5, outer_delay=1)
    ds = [np.arange(1, 7, dtype=np.float32) * (-1) ** n for n in (0, 0, 0, 0, 1)]
    for version in range(2):
        before = state.theta
        state.advance(state.merge([delta("a", version, ds[version])], []))
        assert (state.theta == before - ds[version]).all()
    for version in range(2, 5):
        tried = [state.merge([delta("a", version, ds[version])], []) for _ in range(2)]
        assert tried[0].theta.tobytes() == tried[1].theta.tobytes()
        assert tried[0].digest == tried[1].digest
        assert np.isfinite(tried[0].theta).all()
        state.advance(tried[1])
    plain = 10 - ds[0] * 3
    assert not np.allclose(state.theta, plain)
    before = state.theta
    state.advance(state.merge([delta("a", 5, ds[0], steps=1)], []))  # as a run's last ones
    assert (state.theta == before - ds[0]).all()


def test_extrapolation_measures_the_deltas_against_their_mean():
    """Four orthogonal ones of length 2 and equal weights: their mean is of length 1, so the step is twice it."""
    state = fragment(outer="extrapolated")
    state.advance(state.merge([delta(f"l{n}", 0, 2 * np.eye(6, dtype=np.float32)[n]) for n in range(4)], []))
    assert state.theta.tolist() == pytest.approx([9.0] * 4 + [10.0] * 2)
