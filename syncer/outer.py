"""The outer optimizer on one global fragment: SGD with Nesterov momentum (paper, outer step), or Muon. Pure numpy.

Nesterov's is elementwise and done in blocks. Muon's (after Jordan et al., Muon: An optimizer for hidden layers in
neural networks, 2024, where it is an inner optimizer) is the same but for matrices: their step is orthogonalised, each
as a whole.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pipeline.fragments import FragmentLayout

from .norms import BLOCK, squares

Float32 = npt.NDArray[np.float32]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""a, b, c of x -> a x + b x^3 + c x^5, which takes singular values of at most 1 towards 1 (Jordan et al., 2024)."""
NEWTON_SCHULZ_STEPS = 5
_NO_DIRECTION = 1e-30
"""A matrix shorter than this is left as it is: it is rounding noise."""


class NesterovStep:
    """One outer step, block by block: `b = mu*b + D; theta -= lr*(D + mu*b)`, as torch.optim.SGD(nesterov=True)."""

    def __init__(
        self,
        theta: Float32 | None,
        momentum: Float32 | None,
        out: Float32,
        momentum_out: Float32 | None,
        lr: float,
        mu: float,
    ) -> None:
        """What each block reads and writes.

        Args:
            theta: (elements,) the global fragment; None: `out` is overwritten with what would be subtracted from it.
            momentum: (elements,) b; None: zeros.
            out: (elements,) D, overwritten with the new values.
            momentum_out: (elements,), overwritten with the new b; it may be `momentum`. None: plain SGD, and mu is 0.
            lr: outer learning rate.
            mu: outer momentum.
        """
        if momentum_out is None and mu:
            raise ValueError(f"mu={mu} needs a momentum buffer")
        self._theta, self._momentum, self._out, self._momentum_out = theta, momentum, out, momentum_out
        self._lr, self._mu = lr, mu
        self._scratch = np.empty(min(BLOCK, len(out)), np.float32)

    def block(self, start: int, stop: int) -> None:
        """Elements [start, stop), at most `BLOCK` of them."""
        step = self._scratch[: stop - start]
        if self._momentum_out is None:
            self.go(start, stop, self._out[start:stop], step)
        else:
            self.direction(start, stop, step)
            self.go(start, stop, step, step)

    def direction(self, start: int, stop: int, step: Float32) -> None:
        """The new b of elements [start, stop), and into step (stop - start,): D + mu*b."""
        assert self._momentum_out is not None  # noqa: S101  # there is momentum
        d, b = self._out[start:stop], self._momentum_out[start:stop]
        if self._momentum is None:
            b.fill(0)
        else:
            np.multiply(self._momentum[start:stop], self._mu, out=b)
        np.add(b, d, out=b)
        np.multiply(b, self._mu, out=step)
        np.add(step, d, out=step)

    def go(self, start: int, stop: int, step: Float32, scratch: Float32) -> None:
        """The new values of elements [start, stop), lr*step further; both (stop - start,), and may be the same."""
        if self._theta is None:
            np.multiply(step, self._lr, out=self._out[start:stop])
        else:
            np.multiply(step, self._lr, out=scratch)
            np.subtract(self._theta[start:stop], scratch, out=self._out[start:stop])


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


def muon_step(
    layout: FragmentLayout,
    theta: Float32 | None,
    momentum: Float32 | None,
    out: Float32,
    momentum_out: Float32,
    lr: float,
    mu: float,
    finish: Callable[[int, int], None],
    recorded: Float32 | None = None,
) -> Float32:
    """One outer step: `b = mu*b + D; theta -= lr*O(D + mu*b)`, where O orthogonalises each matrix at its own length.

    Tensors that are no matrices have O(x) = x, as `NesterovStep`.

    Args:
        layout: says which tensors are matrices.
        theta, momentum, out, momentum_out, lr, mu: as `NesterovStep`.
        finish: called with (start, stop) of each block that is what it will be, from front to back.
        recorded: what this returned for an earlier step, to go by instead of what is computed here; for a replay.

    Returns:
        (matrix elements,) O(D + mu*b) of the matrices, one after another, as computed here.
    """
    plain = NesterovStep(theta, momentum, out, momentum_out, lr, mu)
    found, done = np.empty(matrix_elements(layout), np.float32), 0
    for slot in layout.slots:
        if not slot.tensor.matrix:
            for start in range(slot.start, slot.stop, BLOCK):
                stop = min(start + BLOCK, slot.stop)
                plain.block(start, stop)
                finish(start, stop)
            continue
        part = slice(done, done + slot.stop - slot.start)
        step = found[part]
        plain.direction(slot.start, slot.stop, step)
        np.copyto(step, at_its_length(step.reshape(slot.tensor.shape)))
        taken = step if recorded is None else recorded[part]
        plain.go(slot.start, slot.stop, taken, np.empty_like(taken))
        finish(slot.start, slot.stop)
        done = part.stop
    return found


def at_its_length(matrix: Float32) -> Float32:
    """A matrix (rows, columns) orthogonalised and scaled to the Frobenius length that it had, flat."""
    flat = np.ascontiguousarray(orthogonalised(matrix)).reshape(-1)
    length, now = math.sqrt(squares(matrix.reshape(-1))), math.sqrt(squares(flat))
    scaled: Float32 = np.multiply(flat, np.float32(length / now if now else 0.0))
    return scaled
