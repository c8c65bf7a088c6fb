"""The plain algorithm by hand, and the syncer's fast form of it against it, over shapes, rules, weights and M."""

import math
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.pipeline.fragments import FragmentLayout, Slot, layout_of
from diloco.pipeline.messages.wire import AVERAGED, Codec, MergeName, MergeRule, OuterName, WeightsName
from diloco.syncer import algorithm
from diloco.syncer.admission import Offer
from diloco.syncer.grace import GraceEstimator
from diloco.syncer.merging import merge
from diloco.syncer.merging.fragment import Delta, FragmentState
from diloco.syncer.merging.merge import BLOCK, delta_norms
from diloco.syncer.merging.outer import State
from diloco.syncer.times import TIMES
from diloco.workers.parameters import tensor_table
from tests import samples
from tests.world import plan

CLOSE = 1e-4
"""Of a whole sync, relative to its largest value, as the oracle allows float32."""


# --- by hand ------------------------------------------------------------------------------------------------


def f64(*values: Any) -> npt.NDArray[np.float64]:
    return np.array(values, np.float64)


def test_token_weights_are_quantity_times_quality() -> None:
    """100 * 100/10 = 1000; 300 * 300/10 = 9000; 200 * 200/40 = 1000. Equal weights look at nothing."""
    counters = [(10, 100), (10, 300), (40, 200)]
    np.testing.assert_allclose(algorithm.merge_weights(counters, interval=24), [1 / 11, 9 / 11, 1 / 11])
    np.testing.assert_array_equal(algorithm.merge_weights(counters, "equal", interval=24), [1 / 3] * 3)


def test_rda_has_the_mean_length_and_the_mean_direction() -> None:
    """Lengths 5 and 13 at weights 0.8 and 0.2 are 6.6; a mean of orthogonal ones is shorter, and 0 has no direction."""
    deltas, w = f64([3, 4, 0], [0, 0, 13]), f64(0.8, 0.2)
    direction = f64(0.8 * 0.6, 0.8 * 0.8, 0.2)
    np.testing.assert_allclose(algorithm.rda(deltas, w), 6.6 * direction / np.linalg.norm(direction))
    np.testing.assert_allclose(algorithm.mean(deltas, w), [2.4, 3.2, 2.6])
    np.testing.assert_allclose(algorithm.rda(f64([3, 4], [0, 0]), f64(0.5, 0.5)), [1.5, 2.0])
    np.testing.assert_array_equal(algorithm.rda(f64([3, 4], [-6, -8]), f64(0.5, 0.5)), [0, 0])


def test_a_stale_delta_is_measured_from_the_present_values() -> None:
    """From 10 to 6 is 4; the global has gone to 8 since, from which it is 2. One that the global outran points back."""
    np.testing.assert_array_equal(algorithm.rebased(f64(4, 4), f64(8, 5), f64(10, 10)), [2, -1])


def test_rows_are_merged_each_as_a_tensor() -> None:
    """The first row's learners agree, the second's are orthogonal, the third's cancel."""
    deltas = f64([[2, 0], [2, 0], [1, 1]], [[4, 0], [0, 2], [-3, -3]])
    merged = algorithm.rda_row(deltas, f64(0.5, 0.5))
    np.testing.assert_allclose(merged, [[3, 0], [math.sqrt(2), math.sqrt(2)], [0, 0]])


def test_nesterov_by_hand() -> None:
    """Delta = 1, lr = 1, mu = 0.5: b = 1, 1.5, 1.75 and Theta = 0 - 1.5 - 1.75 - 1.875."""
    theta, b, seen = f64(0), f64(0), []
    for _ in range(3):
        theta, b = algorithm.nesterov(theta, b, f64(1), 1.0, 0.5)
        seen.append((float(b[0]), float(theta[0])))
    assert seen == [(1.0, -1.5), (1.5, -3.25), (1.75, -5.125)]


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (200, 200)])
def test_halleys_iteration_is_its_formula_with_an_inverse_at_the_same_length(shape: tuple[int, int]) -> None:
    """X (a + b X^T X) (1 + c X^T X)^-1, which needs no singular vectors, of a matrix whose Gram matrix has length 1."""
    matrix = np.random.default_rng(0).standard_normal(shape)
    a, b, c = algorithm.HALLEY
    x = matrix / np.linalg.norm(matrix.T @ matrix) ** 0.5
    gram, one = x.T @ x, np.eye(shape[1])
    x = x @ (a * one + b * gram) @ np.linalg.inv(one + c * gram)
    expected = x / np.linalg.norm(x) * np.linalg.norm(matrix)
    np.testing.assert_allclose(algorithm.orthogonalised(matrix), expected, rtol=1e-9, atol=1e-12)
    assert not algorithm.orthogonalised(np.zeros((2, 3))).any()


# --- names --------------------------------------------------------------------------------------------------


def test_the_tables_of_rules_and_the_allowed_values_have_the_same_names() -> None:
    """What settings and messages allow is what the syncer has, plain and fast; the simulated worlds draw all of it."""
    rules = set(get_args(MergeRule))
    assert rules == set(algorithm.MERGE_RULES) == set(merge.RULES) == {*plan.RULES, *plan.AVERAGED_RULES}
    assert set(get_args(WeightsName)) == set(algorithm.WEIGHTS)
    assert set(get_args(OuterName)) == set(algorithm.OUTER)


@pytest.mark.parametrize("name", get_args(MergeName))
def test_every_choice_of_a_merge_gives_each_tensor_a_rule_that_is_there(name: MergeName) -> None:
    """On a model with an embedding, a matrix and a vector."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 2))
    table = tensor_table(model, samples.sync_spec(fragments=1, merge=name))
    assert {tensor.rule for tensor in table} <= set(merge.RULES)


# --- the fast form ------------------------------------------------------------------------------------------

SHAPES = ((12,), (40, 3), (3, 2, 4), (9, 1), (), (0, 3), (1, 30), (BLOCK + 9,), (2, BLOCK // 2 + 1), (40, BLOCK // 16))
FLAT = tuple(shape for shape in SHAPES if math.prod(shape) >= 12)
"""In float32 two or three numbers nearly cancel every now and then, and what is left of them is rounding."""
ROWS = tuple(shape for shape in SHAPES if not shape or shape[0] < BLOCK)
"""Each row is a tensor to the plain form: a hundred thousand of them take minutes."""
COUNTERS = st.tuples(st.integers(1, 2**20), st.integers(1, 2**40))


@st.composite
def layouts(draw: st.DrawFn, averaged: bool = False) -> FragmentLayout:
    """One to four tensors of any shape and rule, matrices among them; or average-only ones."""
    table, rules = [], AVERAGED if averaged else merge.RULES.keys() - AVERAGED
    for number in range(draw(st.integers(1, 4))):
        rule = draw(st.sampled_from(sorted(rules)))
        shape = draw(st.sampled_from({"rda": FLAT, "rda-row": ROWS}.get(rule, SHAPES)))
        matrix = not averaged and len(shape) == 2 and min(shape) > 1 and max(shape) < 100 and draw(st.booleans())
        table.append(samples.tensor(f"t{number}", shape, rule=rule).model_copy(update={"matrix": matrix}))
    table.append(samples.tensor("last", (7,), rule="variance" if averaged else "mean"))
    return layout_of(table).fragments[0]


def is_variance(slot: Slot) -> bool:
    return slot.tensor.rule == "variance"


def deltas_of(layout: FragmentLayout, count: int, wire: Codec, seed: int) -> list[Any]:
    """Of different lengths; a first one of several is all zero now and then."""
    chance = np.random.default_rng(seed)
    found = [(chance.standard_normal(layout.elements) * (i + 1)).astype(np.float32) for i in range(count)]
    if count > 1 and seed % 4 == 0:
        found[0][:] = 0
    return [samples.on_wire(one, wire) for one in found]


def plain_values(deltas: list[Any]) -> list[npt.NDArray[np.float64]]:
    return [np.asarray(delta[:], np.float64) for delta in deltas]


LIES = st.tuples(st.integers(1, 2**53), st.integers(1, 2**53))


@given(st.lists(st.integers(1, 48), min_size=1, max_size=20), LIES)
def test_what_a_learner_claims_makes_its_weight_no_more_than_so_many_times_all_that_others_can_have(
    steps: list[int], lie: tuple[int, int]
) -> None:
    """Beside learners of 10 tokens a step: eight times the rate, and twice the steps."""
    honest = [(one, 10 * one) for one in steps]
    weights = algorithm.merge_weights([*honest, lie], interval=24)
    busiest = max(24, *steps) / steps[0]
    assert weights[-1] <= 2 * 8**2 * busiest * weights[0] * (1 + 1e-9)
    low = algorithm.merge_weights([(24, 240), (1, 1)], interval=24)
    assert low[0] > 0.9, "who claims little takes no weight away"


@given(st.lists(st.integers(1, 48), min_size=1, max_size=20), st.integers(1, 1000))
def test_weights_of_learners_that_are_alike_are_the_papers(steps: list[int], rate: int) -> None:
    """To the bit: no bound is near."""
    counters = [(one, rate * one) for one in steps]
    raw = np.array([algorithm.token_weight(*one) for one in counters])
    np.testing.assert_array_equal(algorithm.merge_weights(counters, interval=24), raw / raw.sum())


@settings(max_examples=40)
@given(
    layouts(),
    st.lists(COUNTERS, min_size=1, max_size=8),
    st.sampled_from(sorted(algorithm.WEIGHTS)),
    st.sampled_from(get_args(Codec)),
    st.integers(0, 8),
    st.sampled_from([0.0, 1.0, 1.5]),
    st.integers(0, 2**32),
)
def test_the_merge_is_the_algorithms_whatever_was_summed_before(
    layout: FragmentLayout,
    counters: list[tuple[int, int]],
    rule: WeightsName,
    wire: Codec,
    before: int,
    clip: float,
    seed: int,
) -> None:
    """Each tensor by its rule, in any codec, on tensors below and above the size of a block; long ones clipped."""
    deltas = deltas_of(layout, len(counters), wire, seed)
    norms, shares = [delta_norms(layout, delta) for delta in deltas], merge.merge_shares(counters, rule, interval=24)
    running = merge.Sum(layout)
    running.values.fill(np.nan)
    factors = algorithm.clip_factors([float(np.linalg.norm(one)) for one in norms], clip)
    running.add(merge.Contributions(deltas[:before], norms[:before], shares[:before], factors[:before]))
    found = running.close(merge.Contributions(deltas, norms, shares, factors))
    clipped = [factor * delta for factor, delta in zip(factors, plain_values(deltas), strict=True)]
    expected = algorithm.pseudogradient(layout, clipped, algorithm.merge_weights(counters, rule, interval=24))
    np.testing.assert_allclose(running.values, expected, rtol=1e-4, atol=1e-5)
    assert found.norm == pytest.approx(float(np.linalg.norm(expected)), rel=1e-5)


@pytest.mark.parametrize(
    ("norms", "multiple", "expected"),
    [
        ([], 2.0, ()),
        ([9.0], 2.0, (1.0,)),
        ([1.0, 9.0], 2.0, (1.0, 1.0)),
        ([1.0, 9.0, 1.0], 2.0, (1.0, 2 / 9, 1.0)),
        ([1.0, 2.0, 8.0, 4.0], 2.0, (1.0, 1.0, 0.5, 1.0)),
        ([1.0, 2.0, 8.0, 4.0], 0.0, (1.0,) * 4),
        ([0.0, 0.0, 5.0], 2.0, (1.0,) * 3),
        ([1.0, 9.0, 9.0, 1.0], 1.0, (1.0, 1 / 9, 1 / 9, 1.0)),
    ],
)
def test_none_is_longer_than_so_many_times_the_lower_median(
    norms: list[float], multiple: float, expected: tuple[float, ...]
) -> None:
    """Of three at least, where that is not 0; half of them cannot move it to their own length."""
    assert algorithm.clip_factors(norms, multiple) == pytest.approx(expected)


@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8),
    st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e3, 1e30]), min_size=1, max_size=8),
    st.floats(1.0, 5.0),
)
def test_a_minority_neither_shrinks_the_others_nor_counts_for_more_and_half_shrinks_alone(
    honest: list[float], others: list[float], multiple: float
) -> None:
    """Whatever the lengths of a minority; and of half, where it has none shorter than the others' shortest."""
    others = others[: len(honest)]
    if len(honest) + len(others) < algorithm.MIN_FOR_MEDIAN:
        return
    norms = [*honest, *others]
    clipped = [factor * norm for factor, norm in zip(algorithm.clip_factors(norms, multiple), norms, strict=True)]
    longest, shortest = multiple * max(honest), multiple * min(honest)
    if any(norm > 0 for norm in others) or len(others) < len(honest):
        assert max(clipped) <= longest * (1 + 1e-12)
    if len(others) < len(honest) or min(others) >= min(honest):
        for norm, now in zip(honest, clipped, strict=False):
            assert now >= min(norm, shortest) * (1 - 1e-12)


def test_half_of_a_window_with_tiny_deltas_makes_the_others_as_tiny() -> None:
    """What the bound cannot do: who has half of a window decides how far it goes."""
    assert algorithm.clip_factors([1.0, 1.1, 1e-20, 1e-20], 2.0) == pytest.approx((2e-20, 2e-20 / 1.1, 1.0, 1.0))


@settings(max_examples=20)
@given(layouts(), st.sampled_from(get_args(Codec)), st.integers(0, 2**32))
def test_a_rebased_delta_is_the_algorithms(layout: FragmentLayout, wire: Codec, seed: int) -> None:
    """In any codec, on tensors below and above the size of a block; its norms are those of what it has become."""
    (delta,) = deltas_of(layout, 1, wire, seed)
    theta, before = deltas_of(layout, 2, "fp32", seed | 1)
    found, norms = merge.rebase(layout, delta, theta, before)
    expected = algorithm.rebased(*plain_values([delta, theta, before]))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)
    assert norms.tobytes() == delta_norms(layout, found).tobytes()


@settings(max_examples=60)
@given(
    layouts(),
    st.sampled_from(sorted(algorithm.OUTER)),
    st.floats(0.01, 2),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_outer_step_is_the_algorithms(
    layout: FragmentLayout, outer: OuterName, lr: float, mu: float, first: bool, seed: int
) -> None:
    """With momentum and without, from none and from some; of one contribution, which is its own pseudogradient."""
    theta, b, delta = deltas_of(layout, 3, "fp32", seed | 1)
    sync = samples.sync_spec(fragments=1, outer=outer)
    found = samples.outer_step(sync, (lr, mu), State(theta, None if first else b), layout, delta)
    given_b = np.zeros(layout.elements) if first else b.astype(np.float64)
    after, momentum = algorithm.outer_step(
        layout, *plain_values([theta]), given_b, *plain_values([delta]), lr, mu, outer
    )
    matrix = np.zeros(layout.elements, bool)
    for slot in layout.slots:
        matrix[slot.start : slot.stop] = slot.tensor.matrix and outer != "nesterov"
    np.testing.assert_allclose(found.theta[~matrix], after[~matrix], rtol=1e-5, atol=1e-5)
    assert np.abs(found.theta - after).max() <= CLOSE * (np.abs(delta).max() + np.abs(after).max())
    np.testing.assert_allclose(0 if found.momentum is None else found.momentum, momentum, rtol=1e-5, atol=1e-5)


@settings(max_examples=25)
@given(
    st.one_of(layouts(), layouts(averaged=True)),
    st.lists(st.lists(COUNTERS, min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from(sorted(algorithm.WEIGHTS)),
    st.sampled_from(sorted(algorithm.OUTER)),
    st.integers(0, 2**32),
)
def test_syncs_of_a_fragment_are_the_algorithms(
    layout: FragmentLayout,
    merges: list[list[tuple[int, int]]],
    weights: WeightsName,
    outer: OuterName,
    seed: int,
) -> None:
    """Weights, merge and outer step together, one version after another, as a syncer commits them; after the first
    version the first contribution is stale."""
    sync = samples.sync_spec(
        fragments=1, weights=weights, outer=outer, outer_lr=0.7, outer_momentum=0.6, sync_interval=1
    )
    (start,) = deltas_of(layout, 1, "fp32", seed)
    state = FragmentState(layout, sync, 0, bytes(16), start, None)
    theta, b = start.astype(np.float64), np.zeros(layout.elements)
    before = theta
    for version, counters in enumerate(merges):
        values = deltas_of(layout, len(counters), "bf16", seed + version)
        offers = [
            Offer(f"{i}-0", samples.header(f"l{i}", base_version=max(0, version - (not i)), steps=steps, tokens=tokens))
            for i, (steps, tokens) in enumerate(counters)
        ]
        deltas = [Delta(o, v, delta_norms(layout, v)) for o, v in zip(offers, values, strict=True)]
        merged = state.merge([state.rebased(delta) for delta in deltas], [])
        assert [part.rebased for part in merged.contributions] == [version > 0] + [False] * (len(counters) - 1)
        w = algorithm.merge_weights(counters, weights, interval=sync.sync_interval)
        plain = plain_values(values)
        if version:
            plain[0] = algorithm.rebased(plain[0], theta, before)
        pseudogradient, before = algorithm.pseudogradient(layout, plain, w), theta
        theta, b = algorithm.outer_step(layout, theta, b, pseudogradient, 0.7, 0.6, outer)
        np.testing.assert_allclose([part.weight for part in merged.contributions], w, rtol=1e-12)
        allowed = (version + 1) * CLOSE * (np.abs(pseudogradient).max() + np.abs(theta).max())
        made = merged.stepped.theta
        assert np.abs(made - theta).max() <= allowed
        if layout.averaged:
            assert merged.stepped.momentum is None
            assert all(
                merged.stepped.theta[s.start : s.stop].min(initial=0) >= 0 for s in layout.slots if is_variance(s)
            )
        state.advance(merged)


SECONDS = st.floats(0, 1e4)


@given(SECONDS, SECONDS, SECONDS, st.floats(1e-6, 1e3), st.integers(0, 50), st.floats(0, 0.99), st.floats(0, 10))
def test_grace_is_the_algorithms(
    quorum: float, sync: float, pull: float, step: float, tau: int, gamma: float, latency: float
) -> None:
    """Of the times seen so far; a single observation is its own average. A pull is part of the sync."""
    known = GraceEstimator()
    known.observe(quorum, sync, step, tau)
    expected = algorithm.grace(step, quorum, sync + pull, tau, gamma, latency)
    assert known.grace_s(step, pull, tau, gamma, latency) == min(expected, TIMES.max_grace_s)
