"""A float32 vector in two halves of 16 bits each, from which it is restored bit for bit. Pure: numpy only.

    high   bfloat16: the values rounded to nearest, ties away from zero
    low    the lower 16 bits of the float32

As integers, bits = (high << 16) + low modulo 2^32, with low as a signed number, -32768..32767. Ties are not rounded to
even: then the tie above an even number and the one below it would both become that number, which makes 65537 floats,
one more than 16 bits can tell apart. Values from 3.396e38 on, which are finite in float32, round to infinity.

A reader of only `high` has the values to 8 bits in half of the bytes. A reader of both has them exactly, in as many
bytes as the float32 vector.
"""

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, Payload, as_bytes, do_nothing

Float32 = npt.NDArray[np.float32]
Half = npt.NDArray[np.uint16]

# Elements processed at a time, such that intermediate arrays stay in the cache.
BLOCK = 128 * 1024
# Bytes per element in either half.
ITEM = 2

_BITS = np.uint32(16)
_HALF = np.uint32(0x8000)


def split(values: Float32, high: Half, low: Half) -> None:
    """Split `values` into both halves; all three are (elements,)."""
    scratch = np.empty(min(BLOCK, len(values)), np.uint32)
    for start in range(0, len(values), BLOCK):
        piece = slice(start, start + BLOCK)
        bits = values[piece].view(np.uint32)
        rounded = scratch[: len(bits)]
        np.add(bits, _HALF, out=rounded)
        np.right_shift(rounded, _BITS, out=rounded)
        np.copyto(high[piece], rounded, casting="unsafe")
        np.copyto(low[piece], bits, casting="unsafe")  # modulo 2^16


def widened(high: npt.NDArray[np.generic]) -> Float32:
    """Return the rounded values (elements,) from the high half, which has 16 bits per element."""
    values = pooled(len(high), np.float32)
    for start in range(0, len(high), BLOCK):
        piece = slice(start, start + BLOCK)
        np.copyto(values[piece], high[piece].view(ml_dtypes.bfloat16))
    return values


def complete(values: Float32, low: npt.NDArray[np.generic]) -> None:
    """Restore in place the exact values (elements,) from rounded ones that `widened` returned.

    low: (elements,) of 16 bits each.
    """
    signed = np.empty(min(BLOCK, len(values)), np.int32)
    for start in range(0, len(values), BLOCK):
        piece = slice(start, start + BLOCK)
        bits = values[piece].view(np.uint32)
        np.copyto(signed[: len(bits)], low[piece].view(np.int16))
        np.add(bits, signed[: len(bits)].view(np.uint32), out=bits)


class Halves:
    """Both halves of a vector that is written from front to back, as payloads."""

    def __init__(self, elements: int, chunk_bytes: int, grown: Grown = do_nothing) -> None:
        """Allocate both halves; `grown` is called as in `Payload`."""
        self._high, self._low = pooled(elements, np.uint16), pooled(elements, np.uint16)
        self._done = 0
        self.high = Payload(as_bytes(self._high), chunk_bytes, grown)
        self.low = Payload(as_bytes(self._low), chunk_bytes, grown)

    def grow_to(self, values: Float32, stop: int) -> None:
        """Declare all of `values` (elements,) before `stop` final."""
        piece = slice(self._done, stop)
        split(values[piece], self._high[piece], self._low[piece])
        self._done = stop
        self.high.grow_to(ITEM * stop)
        self.low.grow_to(ITEM * stop)
