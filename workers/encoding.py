"""Deltas as they travel, from front to back, so that what is encoded can leave while the rest is. Pure: numpy only.

The vectors that they are made of lie where they are encoded: in host memory (`OnHost`), or on the model's device
(`device_encoding`). The exchange only passes them on.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload import quantize
from diloco.pipeline.payload.codec import DTYPES
from diloco.workers.feedback import grown

Float32 = npt.NDArray[np.float32]

BLOCK = 128 * 1024
"""Elements encoded at a time."""
AT_ONCE = 2 * BLOCK
"""A delta of so many is encoded in about the time that it takes to wake another thread and to be woken by it."""


def encode_delta(
    base: Float32,
    values: Callable[[], Float32],
    kind: Codec,
    residual: Float32 | None,
    out: npt.NDArray[np.uint8],
    written: Callable[[int], object] = lambda upto: None,
) -> Float32 | None:
    """The pseudogradient, base minus current, as it travels; returns what is lost of it, where that is kept.

    Args:
        base: (elements,) what it is measured from.
        values: gives the current ones (elements,), which are overwritten.
        kind: of codec.
        residual: (elements,) of earlier deltas, to go with it where the codec quantizes; None: zero.
        out: (`payload_bytes`,) written from front to back.
        written: called with how much of `out` is final, after each step.
    """
    current = values()
    if kind == "bf16" or kind == "fp32":
        delta = out.view(DTYPES[kind])
        for start in range(0, len(base), BLOCK):  # so that the difference stays in the cache until it is converted
            piece = slice(start, start + BLOCK)
            np.subtract(base[piece], current[piece], out=current[piece])
            np.copyto(delta[piece], current[piece], casting="same_kind")
            written(delta.itemsize * min(start + BLOCK, len(base)))
        return None
    encoding = quantize.Encoding(len(base), kind, out)
    for start in range(0, len(base), quantize.GROUP):
        delta = current[start : start + quantize.GROUP]
        np.subtract(base[start : start + quantize.GROUP], delta, out=delta)
        if residual is not None:
            np.add(delta, residual[start : start + quantize.GROUP], out=delta)
        written(encoding.add(delta, delta))
    return current


class Encoder(Protocol):
    """Where a learner's bases and residuals are, and what is computed with them there.

    A vector of its own is a flat float32 one (elements,) of whatever type it likes. Any thread may call it.
    """

    at_once: int
    """Vectors of so many elements take less time than another thread takes to be woken for them; 0: none."""

    def keep(self, values: Float32) -> Any:
        """A global as it was pulled, to be a base from now on: a vector of its own."""

    def read(self, kept: Any) -> Float32:
        """The values of a vector that was kept; not to be written to."""

    def encode(
        self,
        base: Any,
        values: Callable[[], Any],
        kind: Codec,
        residual: Any | None,
        out: npt.NDArray[np.uint8],
        written: Callable[[int], object],
    ) -> Any | None:
        """As `encode_delta`, of vectors of its own; the bytes are the same."""

    def grown(self, error: Any, now: Any | None, fed: Any | None) -> Any:
        """As `feedback.grown`."""


class OnHost:
    """In host memory, by numpy."""

    def __init__(self, at_once: int = 0) -> None:
        self.at_once = at_once

    encode = staticmethod(encode_delta)
    grown = staticmethod(grown)

    @staticmethod
    def keep(values: Float32) -> Float32:
        """As it is."""
        return values

    read = keep
