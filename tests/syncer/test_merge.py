"""The merge against the plain algorithm, for determinism, and at its edges."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.pipeline.fragments import FragmentLayout, layout_of
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.payload import quantize
from diloco.pipeline.payload.codec import DTYPES
from diloco.pipeline.payload.quantize import KINDS
from diloco.syncer.algorithm import merge_weights
from diloco.syncer.merging.merge import BLOCK, Reduced, Sum, delta_norms
from diloco.syncer.merging.outer import State
from tests import samples


def layout(*tensors: tuple[int, str]) -> FragmentLayout:
    table = [
        TensorSpec(name=f"t{i}", shape=(size,), dtype="float32", rule=rule, fragment=0)
        for i, (size, rule) in enumerate(tensors)
    ]
    return layout_of(table).fragments[0]


def merge(
    fragment: FragmentLayout, deltas: Sequence[Any], shares: Any, recorded: Any = None
) -> tuple[np.ndarray, Reduced]:
    """All at once."""
    total = Sum(fragment)
    total.values.fill(np.nan)
    return total.values, total.close(samples.contributions(fragment, deltas, shares), recorded)


def run(fragment: FragmentLayout, deltas: Sequence[np.ndarray], weights: np.ndarray) -> tuple[np.ndarray, float]:
    out, reduced = merge(fragment, deltas, weights)
    return out, reduced.norm


def random_deltas(fragment: FragmentLayout, count: int, dtype: type, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(fragment.elements) * (i + 1)).astype(dtype) for i in range(count)]


@given(st.lists(st.tuples(st.integers(1, 2**40), st.integers(1, 2**62)), min_size=1, max_size=20))
def test_weights_are_never_negative_and_sum_to_one(counters):
    """Whatever positive counters learners claim, the weights are a convex combination."""
    weights = merge_weights(counters, interval=24)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("rule", ["rda", "mean"])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_one_contribution_comes_out_as_it_went_in(rule, dtype):
    """With a single learner a merge is that learner's delta, to the last bit, whatever its share."""
    fragment = layout((BLOCK + 3, rule), (5, rule))
    (delta,) = random_deltas(fragment, 1, dtype)
    out, norm = run(fragment, [delta], np.array([0.3]))
    assert out.tobytes() == delta.astype(np.float32).tobytes()
    assert norm == pytest.approx(np.linalg.norm(delta.astype(np.float64)), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_deltas_merge_as_their_decoded_values_do(kind):
    """To the last bit, in tensors that begin anywhere in a block; norms too."""
    fragment = layout((7, "rda"), (1, "mean"), (BLOCK + 1, "rda"), (300, "mean"))
    given = [quantize.encode(delta, kind) for delta in random_deltas(fragment, 3, np.float32)]
    vectors = [quantize.Quantized(wire, fragment.elements, kind) for wire in given]
    arrays = [vector[:] for vector in vectors]
    weights = merge_weights([(4, 100), (5, 300), (6, 200)], interval=24)
    for vector, array in zip(vectors, arrays, strict=True):
        assert delta_norms(fragment, vector).tobytes() == delta_norms(fragment, array).tobytes()
    assert run(fragment, vectors, weights)[0].tobytes() == run(fragment, arrays, weights)[0].tobytes()


def test_opposite_directions_give_zero_and_not_amplified_noise():
    """Where directions cancel, RDA has none to follow, even if rounding leaves a remainder."""
    fragment = layout((1000, "rda"))
    (v,) = random_deltas(fragment, 1, np.float32)
    for parts in ([v, -v], [v, v, np.float32(-2.1) * v]):
        weights = np.array([0.5, 0.5]) if len(parts) == 2 else np.array([0.25, 0.25, 0.5])
        out, norm = run(fragment, parts, weights)
        assert norm == 0
        assert not out.any()


def test_the_order_of_the_list_decides_the_bits_and_nothing_else():
    """Equal inputs in equal order give equal bits; another order the same up to rounding."""
    fragment = layout((3000, "rda"), (500, "mean"))
    deltas = random_deltas(fragment, 5, ml_dtypes.bfloat16)
    weights = merge_weights([(3, 30), (4, 50), (5, 20), (6, 90), (7, 10)], interval=24)
    first, _ = run(fragment, deltas, weights)
    again, _ = run(fragment, deltas, weights)
    turned, _ = run(fragment, deltas[::-1], weights[::-1])
    assert first.tobytes() == again.tobytes()
    np.testing.assert_allclose(first, turned, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, BLOCK + 1])
def test_one_bad_element_makes_its_tensors_norm_non_finite(bad, dtype, at):
    """A poisoned delta cannot hide an element from its norm, and spoils no other tensor's."""
    fragment = layout((2, "mean"), (BLOCK + 2, "rda"))
    (delta,) = random_deltas(fragment, 1, dtype)
    delta[2 + at] = bad
    norms = delta_norms(fragment, delta)
    assert np.isfinite(norms[0])
    assert not np.isfinite(norms[1])


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e18, 1e30])
def test_norms_neither_overflow_nor_vanish(scale):
    """Squares are summed so that any delta of finite float32 elements has its true norm."""
    fragment = layout((1000, "rda"))
    delta = np.full(1000, scale, np.float32)
    assert delta_norms(fragment, delta)[0] == pytest.approx(scale * np.sqrt(1000), rel=1e-4)


@pytest.mark.parametrize("value", [0.1, 0.37, 0.95])
def test_a_length_is_the_same_on_every_machine_to_5e_7(value):
    """Float32 sums of equal squares drift with the size of what is summed: rows bound it, whatever the machine's order.

    Elements of one sign and size are the worst case; a replay elsewhere allows 1e-6.
    """
    fragment = layout((3 * BLOCK + 77, "rda"))
    delta = np.full(fragment.elements, value, np.float32)
    exact = np.linalg.norm(delta.astype(np.float64))
    assert abs(delta_norms(fragment, delta)[0] - exact) / exact < 2.5e-7


def test_a_merge_scales_by_recorded_lengths_and_measures_its_own():
    """What a replay rests on: the values follow the record, the measurement does not."""
    fragment = layout((300, "rda"), (20, "mean"))
    deltas, weights = random_deltas(fragment, 3, ml_dtypes.bfloat16), np.array([0.2, 0.3, 0.5])
    out, first = merge(fragment, deltas, weights)
    assert first.directions[1] == 0
    again, same = merge(fragment, deltas, weights, first.directions)
    assert same.directions.tolist() == first.directions.tolist()
    assert again.tobytes() == out.tobytes()
    other, second = merge(fragment, deltas, weights, first.directions / 2)
    assert second.directions.tolist() == first.directions.tolist()
    np.testing.assert_allclose(other[:300], 2 * out[:300], rtol=1e-6)
    assert other[300:].tobytes() == out[300:].tobytes()


def in_pairs(values: Sequence[float]) -> float:
    """A sum in numpy's order: eight at a time up to 128, halves above."""
    n = len(values)
    if n > 128:
        half = n // 2 - n // 2 % 8
        return in_pairs(values[:half]) + in_pairs(values[half:])
    whole = n - n % 8
    if not whole:
        return sum(values)
    eight = list(values[:8])
    for at in range(8, whole, 8):
        eight = [one + other for one, other in zip(eight, values[at : at + 8], strict=True)]
    found = ((eight[0] + eight[1]) + (eight[2] + eight[3])) + ((eight[4] + eight[5]) + (eight[6] + eight[7]))
    for value in values[whole:]:
        found += value
    return found


@pytest.mark.parametrize("columns", [1, 5, 8, 21, 128, 129, 300, 768, 5000])
def test_a_rows_length_is_summed_in_one_order_on_every_machine(columns: int) -> None:
    """Or merges by rows would not replay bit for bit elsewhere. A numpy that sums otherwise is told here."""
    squares = np.square(np.random.default_rng(columns).standard_normal((6, columns)))
    assert np.add.reduce(squares, axis=1).tolist() == [in_pairs(row) for row in squares.tolist()]


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("rule", ["mean", "rda-row"])
@pytest.mark.parametrize("cut", [1, 9, BLOCK // 16 + 1])
def test_a_tensor_in_parts_is_merged_and_stepped_as_the_whole_one(cut, rule, momentum):
    """Bit for bit, wherever it is cut, and so is what lies beside it: a layout says when rows travel, not where to."""
    rows = BLOCK // 16 + 40
    whole = samples.tensor("e", (rows, 17), rule=rule)
    beside = samples.tensor("m", (5, 6), 1)
    parts = (whole.model_copy(update={"rows": (0, cut)}), whole.model_copy(update={"rows": (cut, rows), "fragment": 1}))
    rng, weights = np.random.default_rng(0), merge_weights([(4, 1000), (5, 2000), (6, 500)], interval=24)
    values = [{t.name: rng.standard_normal(t.shape).astype(np.float32) for t in (whole, beside)} for _ in range(5)]

    def stepped(table: Sequence[TensorSpec]) -> list[dict[str, np.ndarray]]:
        layout = layout_of(table)
        theta, kept = [], []
        for fragment in layout.fragments:
            state, at, *deltas = (
                np.concatenate([one[s.tensor.name].reshape(-1)[s.within] for s in fragment.slots]) for one in values
            )
            sync, outer = samples.sync_spec(outer_momentum=momentum), (0.9, momentum)
            made = samples.outer_step(sync, outer, State(at, state), fragment, *deltas, shares=weights)
            theta.append(made.theta)
            kept.append(np.zeros_like(made.theta) if made.momentum is None else made.momentum)
        return [layout.whole(theta), layout.whole(kept)]

    for one, other in zip(stepped([whole, beside]), stepped([*parts, beside]), strict=True):
        for name, value in one.items():
            assert value.tobytes() == other[name].tobytes(), name
