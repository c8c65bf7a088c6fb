"""The two halves of a vector: together it, bit for bit; the high one is the nearest bfloat16."""

import ml_dtypes
import numpy as np
import pytest

from diloco.pipeline.payload.codec import as_bytes, payload_digest
from diloco.pipeline.transfer.globals import BLOCK, Halves, complete, split, widened
from tests.world import reference


def halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high, low = np.empty(len(values), np.uint16), np.empty(len(values), np.uint16)
    split(values, high, low)
    return high, low


def join(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    values = widened(high)
    complete(values, low)
    return values


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


LOWS = np.array([0, 1, 2, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF], np.uint32)
EVERY_UPPER = ((np.arange(2**16, dtype=np.uint32)[:, None] << 16) + LOWS).reshape(-1).view(np.float32)
"""Each upper half (sign, exponent, first digits), with lower halves below, at and above a tie."""


def test_both_halves_are_the_values_bit_for_bit() -> None:
    """Zeros of both signs, subnormal, infinite and no numbers among them."""
    high, low = halves(EVERY_UPPER)
    assert (bits(join(high, low)) == bits(EVERY_UPPER)).all()
    # As they come from the bus: 2 bytes an element, called bfloat16.
    assert (bits(join(high.view(ml_dtypes.bfloat16), low.view(ml_dtypes.bfloat16))) == bits(EVERY_UPPER)).all()


def test_the_high_half_is_the_nearest_bfloat16() -> None:
    """As ml_dtypes rounds, but for ties, which go away from zero."""
    values = EVERY_UPPER[np.abs(EVERY_UPPER) < 3.39e38]
    shown = widened(halves(values)[0])
    ties = bits(values) & 0xFFFF == 0x8000
    assert ties.any()
    nearest = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (bits(shown) == bits(nearest))[~ties].all()
    np.testing.assert_array_equal(shown, reference.rounded(values.astype(float)))
    assert (np.abs(shown[ties]) > np.abs(values[ties])).all()
    assert (np.signbit(shown) == np.signbit(values)).all()


@pytest.mark.parametrize("elements", [1, 1000, BLOCK + 1, 2 * BLOCK + 77])
@pytest.mark.parametrize("stretch", [1, 3])
def test_halves_that_grow_are_those_of_the_whole(elements: int, stretch: int) -> None:
    values = np.random.default_rng(0).standard_normal(elements).astype(np.float32)
    high, low = halves(values)
    growing = Halves(elements, 1024)
    for stop in range(0, elements, BLOCK // stretch):
        growing.grow_to(values, stop)
    growing.grow_to(values, elements)
    assert growing.high.ready == growing.high.chunks
    assert growing.high.digest == payload_digest(as_bytes(high), 1024)
    assert growing.low.digest == payload_digest(as_bytes(low), 1024)
    assert (bits(join(high, low)) == bits(values)).all()
    assert (reference.joined(high.tobytes(), low.tobytes()) == values).all()
