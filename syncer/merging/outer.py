"""The outer optimizer on one global fragment: SGD with Nesterov momentum (paper, outer step), or Muon. Pure numpy.

Nesterov's is elementwise and done in blocks. Muon's (after Jordan et al., Muon: An optimizer for hidden layers in
neural networks, 2024, where it is an inner optimizer) is the same but for matrices: their step is orthogonalised, each
as a whole.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.ramps import interval_at
from diloco.syncer.merging.merge import BLOCK, squares

Float32 = npt.NDArray[np.float32]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""a, b, c of x -> a x + b x^3 + c x^5, which takes singular values of at most 1 towards 1 (Jordan et al., 2024)."""
NEWTON_SCHULZ_STEPS = 5
_NO_DIRECTION = 1e-30
"""A matrix shorter than this is left as it is: it is rounding noise."""


class Momentum(NamedTuple):
    """A step's momentum, before it and after it."""

    before: Float32 | None
    """(elements,) b; None: zeros."""
    after: Float32
    """(elements,), overwritten with the new b; it may be `before`."""
    mu: float


def outer_at(sync: SyncSpec, version: int, steps: Iterable[int]) -> tuple[float, float]:
    """Outer learning rate and momentum of the step from this version to the next.

    For the first `outer_warmup` outer steps learners are averaged: rate 1, no momentum. While the model changes fast, a
    step beyond what the learners agree on is a step too far. So it is with what learners leave behind when a run ends:
    where no delta holds half an interval, momentum would repeat a whole one's way.

    Args:
        sync: outer_lr, outer_momentum, outer_warmup and what `interval_at` needs.
        version: of the base.
        steps: inner steps of each contribution.
    """
    if version < sync.outer_warmup or 2 * max(steps) < interval_at(sync, version):
        return 1.0, 0.0
    return sync.outer_lr, sync.outer_momentum


class PlainStep:
    """One outer step, block by block: `theta -= lr*D`, as torch.optim.SGD."""

    def __init__(self, theta: Float32 | None, out: Float32, lr: float) -> None:
        """What each block reads and writes.

        Args:
            theta: (elements,) the global fragment; None: `out` is overwritten with what would be subtracted from it.
            out: (elements,) D, overwritten with the new values.
            lr: outer learning rate.
        """
        self._theta, self._out, self._lr = theta, out, lr
        self._scratch = np.empty(min(BLOCK, len(out)), np.float32)

    def block(self, start: int, stop: int) -> None:
        """Elements [start, stop), at most `BLOCK` of them."""
        self.go(start, stop, self._out[start:stop], self._scratch[: stop - start])

    def go(self, start: int, stop: int, step: Float32, scratch: Float32) -> None:
        """The new values of elements [start, stop), lr*step further; both (stop - start,), and may be the same."""
        if self._theta is None:
            np.multiply(step, self._lr, out=self._out[start:stop])
        else:
            np.multiply(step, self._lr, out=scratch)
            np.subtract(self._theta[start:stop], scratch, out=self._out[start:stop])


class NesterovStep(PlainStep):
    """One outer step, block by block: `b = mu*b + D; theta -= lr*(D + mu*b)`, as torch.optim.SGD(nesterov=True)."""

    def __init__(self, theta: Float32 | None, momentum: Momentum, out: Float32, lr: float) -> None:
        """As `PlainStep`; momentum: read and written too."""
        super().__init__(theta, out, lr)
        self._momentum = momentum

    def block(self, start: int, stop: int) -> None:
        """As `PlainStep`."""
        step = self._scratch[: stop - start]
        self.direction(start, stop, step)
        self.go(start, stop, step, step)

    def direction(self, start: int, stop: int, step: Float32) -> None:
        """The new b of elements [start, stop), and into step (stop - start,): D + mu*b."""
        before, after, mu = self._momentum
        d, b = self._out[start:stop], after[start:stop]
        if before is None:
            b.fill(0)
        else:
            np.multiply(before[start:stop], mu, out=b)
        np.add(b, d, out=b)
        np.multiply(b, mu, out=step)
        np.add(step, d, out=step)


def matrix_elements(layout: FragmentLayout) -> int:
    """Elements of all the fragment's tensors that Muon takes for matrices."""
    return sum(slot.stop - slot.start for slot in layout.slots if slot.tensor.matrix)


def orthogonalised(matrix: Float32) -> Float32:
    """A matrix (rows, columns) with about the same singular vectors, and singular values between 0.7 and 1.2.

    Those far below the others come out smaller: 1e-3 of the length as 0.5 or so, and 0 as 0. The products of matrices
    sum in an order that the machine's libraries choose.
    """
    length = math.sqrt(squares(np.ascontiguousarray(matrix).reshape(-1)))
    if not length > _NO_DIRECTION:
        return matrix
    a, b, c = (np.float32(one) for one in NEWTON_SCHULZ)
    tall = matrix.shape[0] > matrix.shape[1]
    x: Float32 = (matrix.T if tall else matrix) / np.float32(length)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = np.asarray(a * x + (b * gram + c * (gram @ gram)) @ x, np.float32)
    return x.T if tall else x


def muon_blocks(
    layout: FragmentLayout, step: NesterovStep, found: Float32, recorded: Float32 | None = None
) -> Iterator[int]:
    """One outer step: `b = mu*b + D; theta -= lr*O(D + mu*b)`, where O orthogonalises each matrix at its own length.

    Tensors that are no matrices have O(x) = x, as `NesterovStep`.

    Args:
        layout: says which tensors are matrices.
        step: what is read and written.
        found: (matrix elements,), overwritten with O(D + mu*b) of the matrices, one after another, as computed here.
        recorded: what an earlier step found, to go by instead of what is computed here; for a replay.

    Yields:
        The end of each block that is what it will be, from front to back.
    """
    done = 0
    for slot in layout.slots:
        if not slot.tensor.matrix:
            for start in range(slot.start, slot.stop, BLOCK):
                stop = min(start + BLOCK, slot.stop)
                step.block(start, stop)
                yield stop
            continue
        part = slice(done, done + slot.stop - slot.start)
        direction = found[part]
        step.direction(slot.start, slot.stop, direction)
        np.copyto(direction, at_its_length(direction.reshape(slot.tensor.shape)))
        taken = direction if recorded is None else recorded[part]
        step.go(slot.start, slot.stop, taken, np.empty_like(taken))
        yield slot.stop
        done = part.stop


def at_its_length(matrix: Float32) -> Float32:
    """A matrix (rows, columns) orthogonalised and scaled to the Frobenius length that it had, flat."""
    flat = np.ascontiguousarray(orthogonalised(matrix)).reshape(-1)
    length, now = math.sqrt(squares(matrix.reshape(-1))), math.sqrt(squares(flat))
    scaled: Float32 = np.multiply(flat, np.float32(length / now if now else 0.0))
    return scaled
