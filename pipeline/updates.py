"""Globals as updates: what an outer step subtracts, in int8 block scales (`quantize`). Pure: numpy only.

The update *is* the step: values := values of the version before - what its code stands for, in float32. So whoever has
a version and the updates after it has the later ones bit for bit, and no error of rounding adds up. What the code
loses of a step, at most half a scale, is not made up for: the pseudogradients that come next are measured from the
values as they are.

With Nesterov's step s = lr (D + mu b'), b' = mu b + D (`syncer.outer`), the momentum follows from the update too:

    D = (s/lr - mu^2 b) / (1 + mu)   so   b' = (mu b + s/lr) / (1 + mu)

with the quantized s. So momentum goes with the steps that were taken, and costs nothing beside them. A step that only
averaged leaves none. An orthogonalised step (Muon) does not say what it was made from: there the pseudogradient D is
quantized first, and lies on the bus beside the update, for whoever follows the momentum: b' = mu b + D.
"""

import numpy as np
import numpy.typing as npt

from .buffers import take
from .chunks import Payload
from .codec import Vector, as_bytes
from .quantize import GROUP, Encoding, wire_bytes

Float32 = npt.NDArray[np.float32]


def gather(momentum: Float32 | None, merged: Vector, mu: float) -> Float32:
    """The momentum (elements,) after a pseudogradient as it came, in new memory; as `syncer.outer`. None: zeros."""
    gathered = take(len(merged), np.float32)
    for start in range(0, len(merged), GROUP):
        out = gathered[start : start + GROUP]
        if momentum is None:
            out.fill(0)
        else:
            np.multiply(momentum[start : start + GROUP], mu, out=out)
        np.add(out, merged[start : start + GROUP], out=out)
    return gathered


def follow(before: Float32 | None, step: Float32, out: Float32, lr: float, mu: float) -> None:
    """The momentum after a step.

    Args:
        before: (elements,) the momentum before it; None: zeros.
        step: (elements,) what was subtracted from the values; overwritten.
        out: (elements,) overwritten with the new momentum; it may be `before`.
        lr, mu: outer learning rate and momentum.
    """
    np.divide(step, lr, out=step)
    if before is None:
        np.copyto(out, step)
    else:
        np.multiply(before, mu, out=out)
        np.add(out, step, out=out)
    np.divide(out, 1 + mu, out=out)


def advance(
    theta: Float32,
    momentum: Float32 | None,
    update: Vector,
    outer: tuple[float, float] | None = None,
    own: bool = False,
) -> tuple[Float32, Float32 | None]:
    """Values and momentum one update further.

    Args:
        theta: (elements,).
        momentum: (elements,), or None for zeros.
        update: (elements,) as it came.
        outer: learning rate and momentum, where the momentum follows from the update; None: it stays.
        own: both arrays may be written to; else they are left as they are.
    """
    values, gathered = theta if own else take(len(theta), np.float32), momentum
    if outer is not None and (momentum is None or not own):
        gathered = take(len(theta), np.float32)
    for start in range(0, len(theta), GROUP):
        piece = slice(start, start + GROUP)
        step: Float32 = update[start : start + GROUP]
        np.subtract(theta[piece], step, out=values[piece])
        if outer is not None:
            assert gathered is not None  # noqa: S101  # taken
            follow(None if momentum is None else momentum[piece], step, gathered[piece], *outer)
    return values, gathered


class Coded:
    """A pseudogradient that is quantized where it lies."""

    def __init__(self, elements: int, chunk_bytes: int) -> None:
        wire = take(wire_bytes(elements, "int8"), np.uint8)
        self._encoding, self._elements = Encoding(elements, "int8", wire), elements
        self.payload = Payload(as_bytes(wire), chunk_bytes)

    def replace(self, values: Float32) -> None:
        """Make values (elements,) what their code stands for."""
        for start in range(0, self._elements, GROUP):
            piece = values[start : start + GROUP]
            self.payload.written(self._encoding.add(piece, decoded=piece))


class Updating:
    """An update that is being made from front to back, while the steps in an array become the values after them."""

    def __init__(self, elements: int, chunk_bytes: int) -> None:
        wire = take(wire_bytes(elements, "int8"), np.uint8)
        self._encoding = Encoding(elements, "int8", wire)
        self._step = np.empty(min(GROUP, elements), np.float32)
        self._elements, self._done = elements, 0
        self._theta: Float32 | None = None
        self._momentum: tuple[Float32 | None, Float32, float, float] | None = None
        self.payload = Payload(as_bytes(wire), chunk_bytes)

    def begin(self, theta: Float32, momentum: tuple[Float32 | None, Float32, float, float] | None) -> None:
        """From these values (elements,).

        momentum: as `follow`: before and out, each (elements,), lr and mu. None: it does not follow from the update.
        """
        self._theta, self._momentum = theta, momentum

    def stepped(self, steps: Float32, stop: int) -> int:
        """Elements of `steps` (elements,) before `stop` are there; how many of it are values now: whole groups."""
        assert self._theta is not None  # noqa: S101  # begun
        while self._done < self._elements and (upto := min(self._done + GROUP, self._elements)) <= stop:
            piece, step = slice(self._done, upto), self._step[: upto - self._done]
            end = self._encoding.add(steps[piece], decoded=step)
            np.subtract(self._theta[piece], step, out=steps[piece])
            if self._momentum is not None:
                before, out, lr, mu = self._momentum
                follow(None if before is None else before[piece], step, out[piece], lr, mu)
            self.payload.written(end)
            self._done = upto
        return self._done
