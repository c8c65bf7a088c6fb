"""Globals as updates: what an outer step subtracts, in int8 block scales (`quantize`). Pure: numpy only.

The update *is* the step: values := values of the version before - what its code stands for, in float32. So whoever has
a version and the updates after it has the later ones bit for bit, and no error of rounding adds up. What the code
loses of a step, at most half a scale, is not made up for: the pseudogradients that come next are measured from the
values as they are.

The momentum goes with the steps that were taken (`Momentum.follow`), and costs nothing beside them. A step that only
averaged leaves none. An orthogonalised step does not say what it was made from: there the pseudogradient D is
quantized first, and lies on the bus beside the update, for whoever follows the momentum.
"""

import numpy as np

from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, Payload, Vector, as_bytes, nobody
from diloco.pipeline.payload.quantize import GROUP, Encoding, wire_bytes
from diloco.pipeline.transfer.global_format import Float32, Momentum


def gather(before: Float32 | None, mu: float, merged: Vector) -> Float32:
    """The momentum after a pseudogradient (elements,) as it came, in new memory. before: (elements,) or None: zeros."""
    momentum = Momentum(before, pooled(len(merged), np.float32), mu)
    for start in range(0, len(merged), GROUP):
        piece = slice(start, start + GROUP)
        momentum.part(piece).add(merged[piece])
    return momentum.after


def advance(
    theta: Float32,
    before: Float32 | None,
    update: Vector,
    outer: tuple[float, float] | None = None,
    own: bool = False,
) -> tuple[Float32, Float32 | None]:
    """Values and momentum one update further.

    outer: learning rate and momentum, where the momentum follows from the update; None: it stays. own: all arrays may
    be written to; else they are left as they are.
    """
    values, momentum, lr = theta if own else pooled(len(theta), np.float32), None, 1.0
    if outer is not None:
        lr, mu = outer
        momentum = Momentum(before, before if own and before is not None else pooled(len(theta), np.float32), mu)
    for start in range(0, len(theta), GROUP):
        piece = slice(start, start + GROUP)
        step: Float32 = update[start : start + GROUP]
        np.subtract(theta[piece], step, out=values[piece])
        if momentum is not None:
            momentum.part(piece).follow(step, lr)
    return values, before if momentum is None else momentum.after


class _Coding:
    """A vector that is being quantized from front to back, and its payload."""

    def __init__(self, elements: int, chunk_bytes: int, grown: Grown = nobody) -> None:
        """grown: as `Payload`."""
        wire = pooled(wire_bytes(elements, "int8"), np.uint8)
        self._encoding, self._elements = Encoding(elements, "int8", wire), elements
        self.payload = Payload(as_bytes(wire), chunk_bytes, grown)


class CodedGradient(_Coding):
    """A pseudogradient that is quantized where it lies."""

    def replace(self, values: Float32) -> None:
        """Make values (elements,) what their code stands for."""
        for start in range(0, self._elements, GROUP):
            piece = values[start : start + GROUP]
            self.payload.grow_to(self._encoding.add(piece, decoded=piece))


class CodedStep(_Coding):
    """An update: a step that is quantized, and taken as its code says."""

    def coder(self, theta: Float32, lr: float, momentum: Momentum | None) -> "StepCoder":
        """What codes it, from these values (elements,); momentum: None where the update does not tell it."""
        return StepCoder(self._encoding, self.payload, theta, lr, momentum)


class StepCoder:
    """An update that is being made from front to back, while the steps in an array become the values after them."""

    def __init__(
        self, encoding: Encoding, payload: Payload, theta: Float32, lr: float, momentum: Momentum | None
    ) -> None:
        self._encoding, self._payload = encoding, payload
        self._theta, self._lr, self._momentum = theta, lr, momentum
        self._step = np.empty(min(GROUP, len(theta)), np.float32)
        self._done = 0

    def written(self, steps: Float32, stop: int) -> int:
        """Elements of `steps` (elements,) before `stop` are there; how many of it are values now: whole groups."""
        elements = len(self._theta)
        while self._done < elements and (upto := min(self._done + GROUP, elements)) <= stop:
            piece, step = slice(self._done, upto), self._step[: upto - self._done]
            end = self._encoding.add(steps[piece], decoded=step)
            np.subtract(self._theta[piece], step, out=steps[piece])
            if self._momentum is not None:
                self._momentum.part(piece).follow(step, self._lr)
            self._payload.grow_to(end)
            self._done = upto
        return self._done
