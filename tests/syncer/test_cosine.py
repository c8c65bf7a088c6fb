"""Cosines of each delta with its window's others, and of successive merges, are what numpy says they are."""

import ml_dtypes
import numpy as np
import pytest

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.payload import quantize
from diloco.syncer.admission import Offer
from diloco.syncer.merging.fragment import SAMPLE, SAMPLES, STRETCH, Delta, FragmentState, Merged, cosines
from diloco.syncer.merging.merge import delta_norms
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

ELEMENTS = 4000


def window(count: int, elements: int = ELEMENTS, seed: int = 0) -> list[np.ndarray]:
    """Deltas that have a part in common."""
    chance = np.random.default_rng(seed)
    common = chance.standard_normal(elements, np.float32)
    return [common + np.float32(1.5) * chance.standard_normal(elements, np.float32) for _ in range(count)]


def directly(deltas: list[np.ndarray]) -> list[float]:
    units = [delta.astype(np.float64) / np.linalg.norm(delta.astype(np.float64)) for delta in deltas]
    means = [np.mean([other for n, other in enumerate(units) if n != m], axis=0) for m in range(len(units))]
    return [float(np.dot(unit, mean) / np.linalg.norm(mean)) for unit, mean in zip(units, means, strict=True)]


@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_it_is_the_cosine_with_the_mean_direction_of_the_others(count: int) -> None:
    deltas = window(count)
    deltas[0] = -3 * deltas[0]
    assert cosines(deltas) == pytest.approx(directly(deltas), abs=1e-9)


def test_zeros_and_others_that_cancel_are_0() -> None:
    up, right = window(2)
    assert cosines([right, up, -up])[0] == 0.0
    assert cosines([up, up, np.zeros_like(up)]) == pytest.approx([1.0, 1.0, 0.0])
    assert cosines([np.zeros_like(up)] * 2) == [0.0, 0.0]
    assert cosines([up[:1], up[:1]]) == [1.0, 1.0]


def test_a_delta_alone_has_none() -> None:
    assert cosines(window(1)) == [None]


def test_a_sample_says_what_the_whole_delta_says() -> None:
    """From the first element to the last, in every codec."""
    deltas = window(4, 10 * SAMPLE)
    deltas[3] = -deltas[3]
    sampled = cosines(deltas)
    assert sampled == pytest.approx(directly(deltas), abs=0.02)
    assert cosines([delta.astype(ml_dtypes.bfloat16) for delta in deltas]) == pytest.approx(sampled, abs=0.01)
    for kind in ("int8", "int4"):
        coded = [quantize.Quantized(quantize.encode(delta, kind), len(delta), kind) for delta in deltas]
        assert cosines(coded) == pytest.approx(sampled, abs=0.03)
    for edge in (slice(0, STRETCH), slice(-STRETCH, None)):
        one = np.zeros(10 * SAMPLE, np.float32)
        one[edge] = 1
        assert cosines([one, one]) == [pytest.approx(1.0)] * 2


def test_the_samples_of_many_deltas_together_are_bounded() -> None:
    looked_at = 0

    class Counted(np.ndarray):
        def __getitem__(self, part: slice) -> np.ndarray:  # type: ignore[override]
            nonlocal looked_at
            looked_at += part.stop - part.start
            return np.asarray(super().__getitem__(part))

    count = 1024
    found = cosines([np.ones(SAMPLE, np.float32).view(Counted)] * count)
    assert found == pytest.approx([1.0] * count)
    assert looked_at == SAMPLES


def fragment(elements: int) -> FragmentState:
    layout = layout_of([samples.tensor("t", (elements,), rule="mean")]).fragments[0]
    sync = samples.sync_spec(fragments=1, outer_lr=0.7)
    return FragmentState(layout, sync, 0, bytes(16), np.zeros(elements, np.float32), None)


def merged(state: FragmentState, *deltas: np.ndarray) -> Merged:
    offer = Offer("0-0", samples.header(base_version=state.version))
    return state.merge([Delta(offer, delta, delta_norms(state.layout, delta)) for delta in deltas], [])


def test_rho_is_the_cosine_with_the_merge_before() -> None:
    """Not with one whose commit was refused; unknown at first; 0 where a merge is zero."""
    state, (first, refused, other) = fragment(ELEMENTS), window(3)
    found = merged(state, first)
    assert found.rho is None
    state.advance(found)
    merged(state, refused)
    found = merged(state, other, -3 * first)
    assert found.rho == pytest.approx(directly([first, (other - 3 * first) / 2])[0], abs=1e-6)
    state.advance(found)
    state.advance(zero := merged(state, np.zeros_like(first)))
    assert (zero.rho, merged(state, first).rho) == (0.0, 0.0)


def test_rho_of_a_long_fragment_is_sampled() -> None:
    first, second = window(2, 10 * SAMPLE)
    state = fragment(10 * SAMPLE)
    state.advance(merged(state, first))
    assert state.sample is not None
    assert len(state.sample) == SAMPLE
    assert merged(state, second).rho == pytest.approx(directly([first, second])[0], abs=0.01)


@in_virtual_time
async def test_the_tape_has_the_outer_step_of_each_merge_and_rho_from_a_syncers_second_on() -> None:
    """A syncer that takes over has not seen the merge before: unknown for one merge of each fragment."""
    world = VirtualRun(sync_spec(quorum=2, outer_momentum=0.5))
    world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    await world.until_version(4)
    await world.kill_syncer()
    world.start_syncer(syncer_id="other")
    await world.until_version(8)
    merges = [one for one in await world.tape() if isinstance(one, Committed) and one.contributions]
    for fragment in range(world.spec.sync.fragments):
        for syncer in ("syncer", "other"):
            own = [one for one in merges if (one.fragment, one.syncer) == (fragment, syncer)]
            assert len(own) > 2
            assert [one.rho is None for one in own] == [True, *[False] * (len(own) - 1)]
    for one in merges:
        assert one.outer_rate is not None
        assert one.outer_rate > 0
    await end(*learners)
