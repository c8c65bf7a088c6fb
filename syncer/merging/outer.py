"""The outer optimizer on one global fragment: SGD with Nesterov momentum (paper, outer step), or with matrices turned.

Nesterov's is elementwise and done in blocks. Halley's is the same but for matrices, whose steps are orthogonalised,
each as a whole (after Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024, where it is an
inner optimizer), by one of Halley's iterations. Pure numpy.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.ramps import interval_in_force
from diloco.pipeline.transfer.global_format import Momentum
from diloco.syncer.algorithm import HALLEY
from diloco.syncer.merging.merge import BLOCK, Float32, squares

_NO_DIRECTION = 1e-30
"""A matrix shorter than this is left as it is: it is rounding noise."""
_LONGEST = 1e38
"""A longer one is shortened first: its length may be more than float32 can hold."""
_SOLVED_WHOLE = 64
"""Rows of a matrix that is inverted as a whole."""


def outer_at(sync: SyncSpec, version: int, steps: Iterable[int], told: int = 0) -> tuple[float, float]:
    """Outer learning rate and momentum of the step from this version to the next.

    For the first `outer_warmup` outer steps learners are averaged: rate 1, no momentum. While the model changes fast, a
    step beyond what the learners agree on is a step too far. So it is with what learners leave behind when a run ends:
    where no delta holds half an interval, momentum would repeat a whole one's way.

    Args:
        sync: outer_lr, outer_momentum, outer_warmup and what `interval_at` needs.
        version: of the base.
        steps: inner steps of each contribution.
        told: `Head.interval` of the base.
    """
    if version < sync.outer_warmup or 2 * max(steps) < interval_in_force(sync, version, told):
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


class AveragingStep(PlainStep):
    """The outer step of average-only tensors, block by block: `theta -= D`, and a variance below 0 is 0."""

    def __init__(self, layout: FragmentLayout, theta: Float32, out: Float32) -> None:
        """theta, out: as `PlainStep`."""
        super().__init__(theta, out, 1.0)
        self._variances = np.zeros(len(out), np.bool_)
        for slot in layout.slots:
            self._variances[slot.start : slot.stop] = slot.tensor.rule == "variance"

    def block(self, start: int, stop: int) -> None:
        """As `PlainStep`."""
        super().block(start, stop)
        values = self._out[start:stop]
        np.copyto(values, 0.0, where=self._variances[start:stop] & (values < 0))


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
        d, momentum = self._out[start:stop], self._momentum.part(slice(start, stop))
        momentum.add(d)
        np.multiply(momentum.after, momentum.mu, out=step)
        np.add(step, d, out=step)


def matrix_elements(layout: FragmentLayout) -> int:
    """Elements of all the fragment's tensors that are orthogonalised."""
    return sum(slot.stop - slot.start for slot in layout.slots if slot.tensor.matrix)


def at_length_one(matrix: Float32) -> Float32 | None:
    """A matrix as one that is no taller than wide, of length 1; None: it has no direction, or none that is finite."""
    with np.errstate(over="ignore"):
        length = math.sqrt(squares(np.ascontiguousarray(matrix).reshape(-1)))
    if not _NO_DIRECTION < length < math.inf:
        return None
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    if length > _LONGEST:  # and so beyond float32
        x, length = x / np.float32(_LONGEST), length / _LONGEST
    return np.asarray(x / np.float32(length), np.float32)


def halley_iteration(matrix: Float32) -> Float32:
    """A matrix (rows, columns) with the same singular vectors, values mostly between 0.4 and 1, times any number.

    `algorithm.HALLEY`'s x (a + b x^2) / (1 + c x^2) is b/c (x + (ac/b - 1) x / (1 + c x^2)). For a matrix of n x n that
    makes 3 2/3 n^3 operations: n^3 for the Gram matrix, which is symmetric, the rest for the division. The products
    sum in an order that the machine's libraries choose.
    """
    x = at_length_one(matrix)
    if x is None:
        return matrix
    a, b, c = HALLEY
    gram = x @ x.T
    gram *= np.float32(c / math.sqrt(squares(gram.reshape(-1))))
    gram[np.diag_indices(len(gram))] += np.float32(1)
    turned = solved(gram, x)
    turned *= np.float32(a * c / b - 1)
    turned += x
    return turned if turned.shape == matrix.shape else turned.T


def solved(a: Float32, x: Float32) -> Float32:
    """a^-1 x (n, m), for a positive definite matrix a (n, n): 2 n^2 m + 2/3 n^3 operations.

    By halves, so that nearly all of them are in large products: numpy's own takes two and a half times as long. What
    an inverse makes is refined once: Halley's iteration multiplies its error by 89.
    """
    if len(a) <= _SOLVED_WHOLE:
        inverse = np.linalg.inv(a)
        whole = inverse @ x
        return np.asarray(whole + inverse @ (x - a @ whole), np.float32)
    half, columns = len(a) // 2, x.shape[1]
    first = solved(a[:half, :half], np.concatenate((x[:half], a[:half, half:]), axis=1))
    found = np.empty_like(x)
    rest = x[half:] - a[half:, :half] @ first[:, :columns]
    found[half:] = solved(a[half:, half:] - a[half:, :half] @ first[:, columns:], rest)
    np.subtract(first[:, :columns], first[:, columns:] @ found[half:], out=found[:half])
    return found


def matrix_blocks(
    layout: FragmentLayout, step: NesterovStep, found: Float32, recorded: Float32 | None = None
) -> Iterator[int]:
    """One outer step: `b = mu*b + D; theta -= lr*O(D + mu*b)`, where O turns each matrix at its own length.

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
        matrix = direction.reshape(slot.tensor.shape)
        np.copyto(direction, at_its_length(halley_iteration(matrix), matrix))
        taken = direction if recorded is None else recorded[part]
        step.go(slot.start, slot.stop, taken, np.empty_like(taken))
        yield slot.stop
        done = part.stop


def at_its_length(turned: Float32, matrix: Float32) -> Float32:
    """What a matrix (rows, columns) was turned to, scaled to the Frobenius length that it had, flat."""
    flat = np.ascontiguousarray(turned).reshape(-1)
    with np.errstate(over="ignore"):  # what comes out infinite is refused
        length, now = math.sqrt(squares(matrix.reshape(-1))), math.sqrt(squares(flat))
        scaled: Float32 = np.multiply(flat, np.float32(length / now if now else 0.0))
    return scaled
