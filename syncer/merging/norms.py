"""Lengths of deltas: the L2 norm of each tensor, taken block by block while a delta comes in. Pure numpy.

Any order of summing gives the same to about 1e-7 (see `ROW`); which one it is, the machine's libraries choose.
"""

import numpy as np
import numpy.typing as npt

from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.payload.codec import Vector

BLOCK = 128 * 1024
"""Elements worked on at a time: they stay in the cache."""

NORM_BLOCK = 2 * BLOCK
"""The same for lengths, for which only one array is in the cache."""

ROW = 1024
"""Squares of this many elements are summed in float32, the rows in float64: rounding stays below 3e-7 at any size."""

_SAFE_SQUARES = (1e-30, 1e30)
"""Outside of this a float32 sum of squares may have lost small or overflowed on large elements."""

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def all_finite(values: Float32) -> bool:
    """Whether a vector (elements,) has no NaN and no infinity."""
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(values.min(initial=0.0)) and np.isfinite(values.max(initial=0.0)))


def squares(block: Float32) -> float:
    """Sum of squares of one block; non-finite if an element is."""
    whole = len(block) - len(block) % ROW
    rows, rest = block[:whole].reshape(-1, ROW), block[whole:]
    quick = float(np.vecdot(rows, rows).sum(dtype=np.float64)) + float(np.dot(rest, rest))
    if _SAFE_SQUARES[0] < quick < _SAFE_SQUARES[1]:
        return quick
    wide = block.astype(np.float64)
    return float(np.dot(wide, wide))


class DeltaNorms:
    """L2 norm of each tensor of a delta that comes from front to back: each block is looked at as soon as it is whole.

    A tensor with a NaN or an infinity has a non-finite norm. What comes at a time does not change any sum.
    """

    def __init__(self, layout: FragmentLayout) -> None:
        self._slots = layout.slots
        self._squares = np.zeros(len(layout.slots), np.float64)
        self._tensor = self._at = 0
        self._scratch = np.empty(min(NORM_BLOCK, layout.elements), np.float32)

    def advance(self, delta: Vector) -> None:
        """delta: what is here by now, from the first element on, in any codec."""
        with np.errstate(over="ignore", invalid="ignore"):
            while self._tensor < len(self._slots):
                slot = self._slots[self._tensor]
                start, stop = self._at, min(self._at + NORM_BLOCK, slot.stop)
                if stop > len(delta):
                    return
                if start < stop:
                    block = self._scratch[: stop - start]
                    np.copyto(block, delta[start:stop])
                    self._squares[self._tensor] += squares(block)
                self._at = stop
                self._tensor += stop == slot.stop

    def norms(self) -> Float64:
        """(tensors,), once all of the delta was here."""
        with np.errstate(invalid="ignore"):
            found: Float64 = np.sqrt(self._squares)
        return found


def delta_norms(layout: FragmentLayout, delta: Vector) -> Float64:
    """L2 norm (tensors,) of each tensor of a whole delta (elements,); see `DeltaNorms`."""
    norms = DeltaNorms(layout)
    norms.advance(delta)
    return norms.norms()
