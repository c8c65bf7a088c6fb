"""Globals as updates: what an outer step subtracts, in int8 block scales (`quantize`). Pure: numpy only.

The update *is* the step: values := values of the version before - what its code stands for, in float32. So whoever has
a version and the updates after it has the later ones bit for bit, and no error of rounding adds up. What the code
loses of a step, at most half a scale, is not made up for: the pseudogradients that come next are measured from the
values as they are.

The outer state goes with the steps that were taken (`outer_state`), and costs nothing beside them. A step that only
averaged leaves none. An orthogonalised step does not say what it was made from: there the pseudogradient D is
quantized first, and lies on the bus beside the update, for whoever follows the state.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, Payload, Vector, as_bytes, nobody
from diloco.pipeline.payload.quantize import GROUP, Encoding, wire_bytes
from diloco.pipeline.transfer.outer_state import OuterState, StateRule, part

Float32 = npt.NDArray[np.float32]


def gather(rule: StateRule, before: OuterState, merged: Vector) -> OuterState:
    """The state after a pseudogradient (elements,) as it came, in new memory."""
    after = {name: pooled(len(merged), np.float32) for name in rule.names}
    for start in range(0, len(merged), GROUP):
        piece = slice(start, start + GROUP)
        rule.after_pseudogradient(part(before, piece), merged[piece], part(after, piece))
    return after


def advance(
    theta: Float32, state: OuterState, update: Vector, rule: StateRule | None = None, own: bool = False
) -> tuple[Float32, OuterState]:
    """Values and outer state one update further.

    Args:
        theta: (elements,).
        state: before it.
        update: (elements,) as it came.
        rule: where the state follows from the update; None: it stays.
        own: all arrays may be written to; else they are left as they are.
    """
    values, after = theta if own else pooled(len(theta), np.float32), state
    if rule is not None:
        after = {name: state[name] if own and name in state else pooled(len(theta), np.float32) for name in rule.names}
    for start in range(0, len(theta), GROUP):
        piece = slice(start, start + GROUP)
        step: Float32 = update[start : start + GROUP]
        np.subtract(theta[piece], step, out=values[piece])
        if rule is not None:
            rule.after_step(part(state, piece), step, part(after, piece))
    return values, after


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


class Following(NamedTuple):
    """An outer state that goes on with the steps that are taken."""

    rule: StateRule
    before: OuterState
    after: OuterState
    """Overwritten; it may be `before`."""


class CodedStep(_Coding):
    """An update: a step that is quantized, and taken as its code says."""

    def begin(self, theta: Float32, following: Following | None) -> "StepCoder":
        """Take it from these values (elements,); following: None where the state does not follow from the update."""
        return StepCoder(self._encoding, self.payload, theta, following)


class StepCoder:
    """An update that is being made from front to back, while the steps in an array become the values after them."""

    def __init__(self, encoding: Encoding, payload: Payload, theta: Float32, following: Following | None) -> None:
        self._encoding, self._payload, self._theta, self._following = encoding, payload, theta, following
        self._step = np.empty(min(GROUP, len(theta)), np.float32)
        self._done = 0

    def written(self, steps: Float32, stop: int) -> int:
        """Elements of `steps` (elements,) before `stop` are there; how many of it are values now: whole groups."""
        elements = len(self._theta)
        while self._done < elements and (upto := min(self._done + GROUP, elements)) <= stop:
            piece, step = slice(self._done, upto), self._step[: upto - self._done]
            end = self._encoding.add(steps[piece], decoded=step)
            np.subtract(self._theta[piece], step, out=steps[piece])
            if self._following is not None:
                rule, before, after = self._following
                rule.after_step(part(before, piece), step, part(after, piece))
            self._payload.grow_to(end)
            self._done = upto
        return self._done
