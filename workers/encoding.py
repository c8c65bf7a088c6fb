"""What a learner has trained, as it travels. Pure: numpy only."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline import codec, quantize
from pipeline.buffers import take
from pipeline.wire import Codec

Float32 = npt.NDArray[np.float32]

BLOCK = 128 * 1024
"""Elements encoded at a time."""


def encode_delta(
    base: Float32, values: Callable[[], Float32], kind: Codec, residual: Float32 | None
) -> tuple[npt.NDArray[Any], Float32 | None]:
    """The pseudogradient, base minus current, as it travels; with (elements,) what is lost of it, where that is kept.

    Args:
        base: (elements,) what it is measured from.
        values: gives the current ones (elements,), which may be overwritten.
        kind: how it travels.
        residual: (elements,) of earlier deltas, to go with it where the codec quantizes; None: zero.
    """
    now = values()
    if kind == "fp32":
        return np.subtract(base, now, out=now), None
    if kind == "bf16":
        delta = take(len(base), codec.DTYPES[kind])
        for start in range(0, len(base), BLOCK):  # so that the difference stays in the cache until it is converted
            block = slice(start, start + BLOCK)
            np.subtract(base[block], now[block], out=now[block])
            np.copyto(delta[block], now[block], casting="same_kind")
        return delta, None
    encoding, error = quantize.Encoding(len(base), kind), take(len(base), np.float32)
    for start in range(0, len(base), quantize.GROUP):  # what is worked on stays in the cache
        piece = slice(start, start + quantize.GROUP)
        np.subtract(base[piece], now[piece], out=error[piece])
        if residual is not None:
            np.add(error[piece], residual[piece], out=error[piece])
        encoding.add(error[piece], error[piece])
    return encoding.wire, error
