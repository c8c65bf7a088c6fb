"""Deltas in few bits: what is lost has a bound, equal arrays give equal bytes, and hostile bytes do no harm."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as some

from diloco.pipeline.errors import BadPayload
from diloco.pipeline.payload import quantize
from diloco.pipeline.payload.codec import as_bytes, payload_bytes
from diloco.pipeline.payload.quantize import BLOCK, KINDS, MIN_ABSMAX, Kind, Quantized, encode, wire_bytes
from tests.world import reference

LARGEST = {"int8": 127, "int4": 7}


def bound(values: np.ndarray, kind: Kind) -> np.ndarray:
    """(elements,) how far each decoded element may be from what it was."""
    filled = np.zeros(-(-len(values) // BLOCK) * BLOCK)
    filled[: len(values)] = values
    largest = np.repeat(np.abs(filled.reshape(-1, BLOCK)).max(axis=1), BLOCK)[: len(values)]
    lost = largest / LARGEST[kind] / 2 * (1 + 2**-7)
    return np.maximum(lost * (1 + 1e-5), np.where(largest < MIN_ABSMAX, MIN_ABSMAX, 0))


def random(elements: int, seed: int = 0) -> np.ndarray:
    """Elements of many sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(elements) * 10.0 ** rng.uniform(-6, 0, elements)).astype(np.float32)


def decoded(values: np.ndarray, kind: Kind) -> np.ndarray:
    return Quantized(encode(values, kind), len(values), kind)[:]


@given(
    some.arrays(np.float32, st.integers(1, 3 * BLOCK), elements=st.floats(-(2.0**90), 2.0**90, width=32)),
    st.sampled_from(KINDS),
)
def test_what_is_lost_has_a_bound(values, kind):
    """Of each element, by the largest of its block; subnormals, zeros and very unequal elements included."""
    assert (np.abs(decoded(values, kind).astype(np.float64) - values) <= bound(values, kind)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", [1, BLOCK - 1, BLOCK, BLOCK + 1, quantize.GROUP + 3, 3 * quantize.GROUP])
def test_sizes_are_known_from_the_number_of_elements(kind, elements):
    """At and beside the borders of blocks and of pieces, which show nowhere else."""
    values = random(elements)
    wire = encode(values, kind)
    assert len(wire) == wire_bytes(elements, kind) == payload_bytes(elements, kind)
    vector = Quantized(wire, elements, kind)
    assert len(vector) == len(vector[:]) == elements
    assert (np.abs(vector[:].astype(np.float64) - values) <= bound(values, kind)).all()
    assert as_bytes(vector).tobytes() == wire.tobytes()
    np.testing.assert_array_equal(vector[:], reference.dequantized(wire.tobytes(), elements, kind))


@given(st.integers(1, 1000), st.data(), st.sampled_from(KINDS))
def test_any_stretch_decodes_as_it_does_within_the_whole(elements, data, kind):
    """Merges take a tensor at a time, wherever it begins."""
    start = data.draw(st.integers(0, elements))
    stop = data.draw(st.integers(start, elements + 10))
    vector = Quantized(encode(random(elements), kind), elements, kind)
    part = vector[start:stop]
    assert part.dtype == np.float32
    assert part.tobytes() == vector[:][start:stop].tobytes()
    with pytest.raises(ValueError, match="only slices of step 1"):
        vector[::2]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_arrays_give_equal_bytes_and_the_input_stays(kind):
    """Also of bfloat16, in which a float32 array is the same numbers."""
    values = random(2000).astype(ml_dtypes.bfloat16)
    same, kept = values.astype(np.float32), values.tobytes()
    assert encode(values, kind).tobytes() == encode(same, kind).tobytes() == encode(same.copy(), kind).tobytes()
    assert values.tobytes() == kept


@given(st.integers(1, 2000), st.integers(0, 100), st.sampled_from(KINDS))
def test_the_error_is_what_was_lost(elements, seed, kind):
    """To the last bit, also where it takes the place of the values."""
    values = random(elements, seed)
    error = np.empty_like(values)
    wire = encode(values, kind, error=error)
    assert wire.tobytes() == encode(values, kind).tobytes()
    np.testing.assert_array_equal(error, values - Quantized(wire, elements, kind)[:])
    in_place = values.copy()
    assert encode(in_place, kind, error=in_place).tobytes() == wire.tobytes()
    np.testing.assert_array_equal(in_place, error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_decodes_to_what_is_not_finite(kind, bad):
    """In its block; the others are as without it. The syncer looks at decoded values, and refuses."""
    values = random(3 * BLOCK)
    spoilt = values.copy()
    spoilt[BLOCK + 7] = bad
    found = decoded(spoilt, kind)
    assert not np.isfinite(found[BLOCK : 2 * BLOCK]).any()
    kept = np.r_[0:BLOCK, 2 * BLOCK : 3 * BLOCK]
    assert found[kept].tobytes() == decoded(values, kind)[kept].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_size_or_a_negative_scale_is_refused(kind):
    """Before anything is decoded, with the block's number."""
    wire = encode(random(3 * BLOCK), kind)
    for length in (0, len(wire) - 1, len(wire) + 1):
        with pytest.raises(BadPayload, match="bytes"):
            Quantized(np.resize(wire, length), 3 * BLOCK, kind)
    spoilt = wire.copy()
    spoilt[: 2 * 3].view(ml_dtypes.bfloat16)[2] *= -1
    with pytest.raises(BadPayload, match="scale of block 2 is negative"):
        Quantized(spoilt, 3 * BLOCK, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_encoded_first_can_be_decoded_first(kind):
    """Group by group: the bytes that are final stay as they are, and hold the elements that they say."""
    elements = 2 * quantize.GROUP + 1000
    values, whole = random(elements), encode(random(elements), kind)
    encoding, ready = quantize.Encoding(elements, kind), 0
    for start in range(0, elements, quantize.GROUP):
        assert quantize.decodable(ready, elements, kind) == start
        ready = encoding.add(values[start : start + quantize.GROUP])
        assert encoding.wire[:ready].tobytes() == whole[:ready].tobytes()
        here = quantize.decodable(ready, elements, kind)
        assert here == min(start + quantize.GROUP, elements)
        part = Quantized(encoding.wire[:ready], here, kind)
        assert part[:].tobytes() == decoded(values, kind)[:here].tobytes()
    assert ready == len(encoding.wire)
    assert quantize.decodable(ready - 1, elements, kind) == 2 * quantize.GROUP
    with pytest.raises(ValueError, match="the rest"):
        quantize.Encoding(elements, kind).add(values[:100])


@pytest.mark.parametrize("kind", KINDS)
def test_no_large_temporaries(kind):
    """Beside the bytes that come out, a few pieces that stay in the cache."""
    values, few = random(2**22), 10 * 4 * quantize.GROUP
    tracemalloc.start()
    try:
        wire = encode(values, kind, error=values)
        assert tracemalloc.get_traced_memory()[1] < len(wire) + few
        tracemalloc.reset_peak()
        vector = Quantized(wire, len(values), kind)
        for start in range(0, len(values), 2**17):
            vector[start : start + 2**17]
        assert tracemalloc.get_traced_memory()[1] < len(wire) + few
    finally:
        tracemalloc.stop()
