"""Promises about what a learner's deltas are on the wire in every codec, encoded in host memory and on a device."""

from collections.abc import Callable
from typing import Any, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import DTYPES, TRAITS, as_vector, payload_bytes
from diloco.pipeline.payload.quantize import BLOCK, GROUP
from diloco.syncer.merging.merge import delta_norms
from diloco.workers import device_encoding, encoding
from diloco.workers.device_encoding import OnDevice
from diloco.workers.encoding import OnHost
from tests import samples

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

ELEMENTS = 2 * GROUP + BLOCK + 7
"""Several of what is encoded at a time, with an incomplete block at the end."""
RNG = np.random.default_rng(0)
DELTA = (RNG.standard_normal(ELEMENTS) * 10.0 ** RNG.uniform(-9, 3, ELEMENTS)).astype(np.float32)
HARD = [
    *(0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, -1 - 3 * 2**-11, 65504, -65519, 65520, 1e5, -1e6, 1e30, -3e38),
    *(3e38, 1e-44, -1e-40, 1e-38, 2.0**-100, -(2.0**-26), 2.0**-25, 2.0**-24),
]
DELTA[: 500 * len(HARD) : 500] = HARD
LAYOUT = layout_of([samples.tensor("t", (ELEMENTS,), rule="rda")]).fragments[0]


# --- what the bytes are, by other means ---------------------------------------------------------------------


def bf16(delta: Float32) -> Bytes:
    """The upper half of each number's bits, rounded to nearest, ties to even."""
    bits = delta.view(np.uint32).astype(np.uint64)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2").view(np.uint8)


def in_blocks(delta: Float32, largest: int) -> Bytes:
    """Each group's scales, rounded up to bf16, then its codes, to nearest, ties to even."""
    parts = []
    for group in np.split(delta, range(GROUP, len(delta), GROUP)):
        blocks = np.pad(group, (0, -len(group) % BLOCK)).reshape(-1, BLOCK)
        exact = np.abs(blocks).max(axis=1) / np.float32(largest)
        near = exact.astype(ml_dtypes.bfloat16)
        scales = np.where(near.astype(np.float32) < exact, np.nextafter(near, ml_dtypes.bfloat16(np.inf)), near)
        codes = np.rint(blocks * (1 / scales.astype(np.float32))[:, None]).astype(np.int8).reshape(-1)
        parts += [scales.view(np.uint8), codes.view(np.uint8) if largest > 7 else codes[::2] & 15 | codes[1::2] << 4]
    return np.concatenate([part.view(np.uint8) for part in parts])


REFERENCES: dict[Codec, Callable[[Float32], Bytes]] = {
    "bf16": bf16,
    "fp32": lambda delta: np.frombuffer(delta.astype("<f4").tobytes(), np.uint8),
    "int8": lambda delta: in_blocks(delta, 127),
    "int4": lambda delta: in_blocks(delta, 7),
}


# --- what must hold in every codec --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def by_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BLOCK", GROUP)
    monkeypatch.setattr(device_encoding, "PIECE", GROUP)


@pytest.fixture(params=["host", "device"])
def encoder(request: pytest.FixtureRequest) -> Any:
    return OnHost() if request.param == "host" else OnDevice(torch.device("cpu"))


def encoded(encoder: Any, delta: Float32, codec: Codec, residual: Float32 | None = None) -> tuple[Bytes, Any]:
    """A delta's bytes and what the encoder returns."""
    wire = np.empty(payload_bytes(len(delta), codec), np.uint8)
    fed = None if residual is None else encoder.keep(residual)
    base, values = encoder.keep(delta.copy()), encoder.keep(np.zeros_like(delta))
    error = encoder.encode(base, lambda: values, codec, fed, wire, lambda upto: None)
    return wire, None if error is None else encoder.read(error)


@pytest.mark.parametrize("codec", get_args(Codec))
def test_the_bytes_are_those_of_the_reference(encoder: Any, codec: Codec) -> None:
    """Of elements of all sizes, ties and subnormal numbers among them."""
    assert codec in REFERENCES, f"say in REFERENCES what the bytes of {codec} are, by other means than its encoders"
    np.testing.assert_array_equal(encoded(encoder, DELTA, codec)[0], REFERENCES[codec](DELTA))


@pytest.mark.parametrize("codec", get_args(Codec))
def test_an_error_is_returned_if_the_codec_has_feedback(encoder: Any, codec: Codec) -> None:
    """What was to be sent, the residual included, minus what the syncer decodes."""
    wire, error = encoded(encoder, DELTA, codec)
    assert (error is not None) is TRAITS[codec].feedback
    if error is not None:
        np.testing.assert_array_equal(error, DELTA - as_vector(wire, ELEMENTS, codec)[:])
        again, _ = encoded(encoder, DELTA, codec, error)
        np.testing.assert_array_equal(again, REFERENCES[codec](DELTA + error))


@pytest.mark.parametrize("codec", get_args(Codec))
def test_what_is_finite_has_a_finite_norm(encoder: Any, codec: Codec) -> None:
    """A codec of a smaller range than float32 limits what is beyond it: else the syncer would refuse the delta."""
    assert np.abs(DELTA).max() == np.float32(3e38)
    assert np.isfinite(delta_norms(LAYOUT, as_vector(encoded(encoder, DELTA, codec)[0], ELEMENTS, codec))).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", get_args(Codec))
def test_one_element_that_is_not_finite_has_a_norm_that_is_not(encoder: Any, codec: Codec, value: float) -> None:
    """Wherever it is: the syncer refuses such a delta by its norm."""
    for at in (0, BLOCK, GROUP - 1, GROUP, ELEMENTS - 1):
        delta = DELTA.copy()
        delta[at] = value
        wire, _ = encoded(encoder, delta, codec)
        assert not np.isfinite(delta_norms(LAYOUT, as_vector(wire, ELEMENTS, codec))).any(), at


@pytest.mark.parametrize("codec", DTYPES)
def test_bytes_may_overwrite_the_values_that_they_are_made_of(codec: Codec) -> None:
    """In host memory, where a rank that has a whole fragment takes no more room for its payload."""
    values = np.zeros_like(DELTA)
    wire = values.view(np.uint8)[: payload_bytes(ELEMENTS, codec)]
    OnHost.encode(DELTA, lambda: values, codec, None, wire)
    np.testing.assert_array_equal(wire, REFERENCES[codec](DELTA))
