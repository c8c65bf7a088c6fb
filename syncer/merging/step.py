"""The outer step of one fragment: from the sum of a window's deltas to the next version and its payloads. Pure.

The step is written from front to back over the sum, in the sum's memory. The payloads grow with it, so that they can be
uploaded meanwhile. Values and momentum before the step are not changed.
"""

from typing import NamedTuple

import numpy as np

from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, nobody
from diloco.pipeline.transfer.globals import GrowingGlobal
from diloco.syncer.merging.merge import Contributions, Float32, Float64, Reduced, Sum
from diloco.syncer.merging.outer import (
    AveragingStep,
    Momentum,
    NesterovStep,
    Outer,
    PlainStep,
    matrix_blocks,
    matrix_elements,
)


class State(NamedTuple):
    """Values and outer momentum of a fragment at one version."""

    theta: Float32
    """(elements,)"""
    momentum: Float32 | None
    """(elements,); None stands for zeros."""


class Recorded(NamedTuple):
    """Outcome of an earlier step that a replay follows, where the machine's libraries choose an order of summation."""

    directions: Float64
    """(tensors,): `merge.Reduced.directions`."""
    orthogonal: Float32 | None
    """`Stepped.orthogonal`."""


class Stepped(NamedTuple):
    """Outcome of an outer step."""

    theta: Float32
    """(elements,)"""
    momentum: Float32 | None
    """(elements,); None stands for zeros."""
    digest: bytes
    """Digest of theta."""
    reduced: Reduced
    orthogonal: Float32 | None
    """(matrix elements,): `found` of `outer.matrix_blocks`; None for a step that orthogonalises nothing."""


class OuterStep:
    """One outer step (paper: RDA, outer optimizer), which is taken once. Its payloads are there from the start."""

    def __init__(
        self,
        total: Sum,
        contributions: Contributions,
        sync: SyncSpec,
        outer: Outer,
        before: State,
        grown: Grown = nobody,
    ) -> None:
        """Allocate what the step writes, besides the sum's memory.

        Args:
            total: has the first of the contributions, or none; overwritten by the step.
            contributions: all that are merged.
            sync: outer optimizer, codec of the global and chunk size.
            outer: from `outer.outer_at`.
            before: the state at the base.
            grown: called by the thread that takes the step, when more chunks of any payload are whole.
        """
        self._sum, self._contributions, layout = total, contributions, total.layout
        theta, values, (lr, mu) = before.theta, total.values, outer
        # A step that only averages keeps no momentum: the next step with momentum starts from zeros.
        self._momentum = pooled(layout.elements, np.float32) if mu else None
        self._matrices: tuple[NesterovStep, Float32] | None = None
        self._step: PlainStep
        if self._momentum is not None:
            self._step = step = NesterovStep(theta, Momentum(before.momentum, self._momentum, mu), values, lr)
            if sync.outer == "halley" and (elements := matrix_elements(layout)):
                self._matrices = step, np.empty(elements, np.float32)
        elif layout.averaged:
            self._step = AveragingStep(layout, theta, values)
        else:
            self._step = PlainStep(theta, values, lr)
        self.growing = GrowingGlobal(values, self._momentum, sync, grown)

    @property
    def orthogonalises(self) -> bool:
        """True if the step orthogonalises matrices."""
        return self._matrices is not None

    def take(self, recorded: Recorded | None = None) -> Stepped:
        """Add the rest of the contributions and take the step. recorded: what a replay follows."""
        directions, orthogonal = (None, None) if recorded is None else recorded
        if self._matrices is None:
            # Each block is stepped right after its merge, while it is in the CPU cache.
            reduced, found = self._sum.close(self._contributions, directions, self._block), None
        else:
            # A matrix is orthogonalised as a whole, so all of it must be merged first: this needs a second pass.
            reduced, (step, found) = self._sum.close(self._contributions, directions), self._matrices
            for stop in matrix_blocks(self._sum.layout, step, found, orthogonal):
                self.growing.grow_to(stop)
        return Stepped(self._sum.values, self._momentum, self.growing.digest, reduced, found)

    def _block(self, start: int, stop: int) -> None:
        self._step.block(start, stop)
        self.growing.grow_to(stop)
