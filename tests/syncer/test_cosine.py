"""The cosine of each delta with its window's others is what numpy says it is."""

import ml_dtypes
import numpy as np
import pytest

from diloco.pipeline.payload import quantize
from diloco.syncer.merging.fragment import SAMPLE, SAMPLES, STRETCH, cosines

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
    for end in (slice(0, STRETCH), slice(-STRETCH, None)):
        one = np.zeros(10 * SAMPLE, np.float32)
        one[end] = 1
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
