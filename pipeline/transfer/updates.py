"""Updates: what an outer step subtracts from the values, in int8 with block scales (`quantize`). Pure: numpy only.

The update *is* the step: values := previous values - decoded update, in float32. So a reader with some version and the
updates after it computes the later versions bit for bit, and no rounding error accumulates. What quantization loses of
a step, at most half a scale, is not added back later: the next pseudogradients are measured from the actual values.

The momentum is computed from the steps that were taken (`Momentum.follow`), so it needs no upload of its own. A step
that only averaged leaves no momentum. An orthogonalised step does not determine the pseudogradient D it was made from.
In that case D is quantized before the step, and lies on the bus beside the update for readers that need the momentum.
"""

import numpy as np

from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, Payload, Vector, as_bytes, nobody
from diloco.pipeline.payload.quantize import GROUP, Encoding, wire_bytes
from diloco.pipeline.transfer.global_format import Float32, Momentum


def gather(before: Float32 | None, mu: float, merged: Vector) -> Float32:
    """Return the momentum after a step with the pseudogradient `merged` (elements,), in new memory.

    before: (elements,) momentum before the step; None means zeros.
    """
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
    """Return values and momentum after one update.

    Args:
        theta: (elements,) values before it.
        before: (elements,) momentum before it; None means zeros.
        update: (elements,) the update.
        outer: learning rate and momentum, if the momentum follows from the update; None: the momentum stays.
        own: the arrays may be overwritten; otherwise they stay unchanged.
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
    """A vector that is quantized from front to back, and its payload."""

    def __init__(self, elements: int, chunk_bytes: int, grown: Grown = nobody) -> None:
        """Allocate the payload; `grown` is called as in `Payload`."""
        wire = pooled(wire_bytes(elements, "int8"), np.uint8)
        self._encoding, self._elements = Encoding(elements, "int8", wire), elements
        self.payload = Payload(as_bytes(wire), chunk_bytes, grown)


class CodedGradient(_Coding):
    """A pseudogradient that is quantized in place."""

    def replace(self, values: Float32) -> None:
        """Replace values (elements,) by what their quantized form decodes to."""
        for start in range(0, self._elements, GROUP):
            piece = values[start : start + GROUP]
            self.payload.grow_to(self._encoding.add(piece, decoded=piece))


class CodedStep(_Coding):
    """An update: the step is quantized, and its decoded form is what the values change by."""

    def coder(self, theta: Float32, lr: float, momentum: Momentum | None) -> "StepCoder":
        """Return a coder for a step from `theta` (elements,); momentum: None if it does not follow from the update."""
        return StepCoder(self._encoding, self.payload, theta, lr, momentum)


class StepCoder:
    """Quantizes a step from front to back, and replaces the step in its array by the values after it."""

    def __init__(
        self, encoding: Encoding, payload: Payload, theta: Float32, lr: float, momentum: Momentum | None
    ) -> None:
        self._encoding, self._payload = encoding, payload
        self._theta, self._lr, self._momentum = theta, lr, momentum
        self._step = np.empty(min(GROUP, len(theta)), np.float32)
        self._done = 0

    def written(self, steps: Float32, stop: int) -> int:
        """Process `steps` (elements,), final before `stop`; return how many are values now, in whole groups."""
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
