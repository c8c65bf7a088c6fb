"""The outer step of one fragment: its optimizers, and the way from a window's sum to the next version. Pure numpy.

An `OuterStep` writes from front to back over the sum, in the sum's memory. Its payloads grow with it, so that they can
be uploaded meanwhile. Values and momentum before the step are not changed.

The optimizers are SGD with Nesterov momentum (paper, outer step), and Halley's. Nesterov's step is elementwise and is
taken block by block. Halley's is the same, except that the step of each matrix is orthogonalised as a whole by one
Halley iteration (after Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024, where it is an
inner optimizer).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, do_nothing
from diloco.pipeline.ramps import interval_in_force
from diloco.pipeline.transfer.globals import GrowingGlobal
from diloco.syncer.algorithm import HALLEY
from diloco.syncer.merging.merge import BLOCK, Contributions, Float32, Float64, Reduced, Sum, squares

# A matrix shorter than this is rounding noise and is left unchanged.
_NO_DIRECTION = 1e-30
# A longer matrix is scaled down first, because float32 may not be able to hold its length.
_LONGEST = 1e38
# A matrix of at most this many rows is inverted as a whole.
_SOLVED_WHOLE = 64


class Outer(NamedTuple):
    """Learning rate and momentum of one outer step."""

    lr: float
    mu: float
    """0: the step keeps no momentum."""


def outer_at(sync: SyncSpec, version: int, steps: Iterable[int], told: int = 0) -> Outer:
    """Return the outer learning rate and momentum of the step from this version to the next.

    The first `outer_warmup` outer steps only average the learners (rate 1, no momentum): while the model changes fast,
    a step beyond what the learners agree on overshoots. So does a step in which no delta holds half an interval, as
    with the last deltas of a run: momentum would add the movement of a whole interval to them.

    `version` and `told` (`Head.interval`) are the base's, `steps` the inner steps of each contribution.
    """
    if version < sync.outer_warmup or 2 * max(steps) < interval_in_force(sync, version, told):
        return Outer(1.0, 0.0)
    return Outer(sync.outer_lr, sync.outer_momentum)


class PlainStep:
    """One outer step, taken block by block: `theta -= lr*D`, like torch.optim.SGD."""

    def __init__(self, theta: Float32, out: Float32, lr: float) -> None:
        """Read theta (elements,); out (elements,) has D and is overwritten with the new values."""
        self._theta, self._out, self._lr = theta, out, lr
        self._scratch = np.empty(min(BLOCK, len(out)), np.float32)
        self.squares = 0.0
        """Sum of the squares of the step so far: of lr*step, which is subtracted from theta."""

    def block(self, start: int, stop: int) -> None:
        """Take the step for elements [start, stop), at most `BLOCK` of them."""
        self.apply_step(start, stop, self._out[start:stop], self._scratch[: stop - start])

    def apply_step(self, start: int, stop: int, step: Float32, scratch: Float32) -> None:
        """Write theta - lr*step of elements [start, stop). step and scratch, both (stop - start,), may be the same."""
        np.multiply(step, self._lr, out=scratch)
        self.squares += squares(scratch)
        np.subtract(self._theta[start:stop], scratch, out=self._out[start:stop])


class AveragingStep(PlainStep):
    """The outer step of average-only tensors, taken block by block: `theta -= D`; negative variances become 0."""

    def __init__(self, layout: FragmentLayout, theta: Float32, out: Float32) -> None:
        super().__init__(theta, out, 1.0)
        self._variances = np.zeros(len(out), np.bool_)
        for slot in layout.slots:
            self._variances[slot.start : slot.stop] = slot.tensor.rule == "variance"

    @override
    def block(self, start: int, stop: int) -> None:
        part = slice(start, stop)
        np.minimum(self._out[part], self._theta[part], out=self._out[part], where=self._variances[part])
        super().block(start, stop)


class NesterovStep(PlainStep):
    """One outer step, block by block: `b = mu*b + D; theta -= lr*(D + mu*b)`, like torch.optim.SGD(nesterov=True)."""

    def __init__(
        self, theta: Float32, out: Float32, lr: float, mu: float, before: Float32 | None, after: Float32
    ) -> None:
        """Also read the momentum before (elements,), None for zeros, and write that after; both may be one array."""
        super().__init__(theta, out, lr)
        self._mu, self._before, self._after = mu, before, after

    @override
    def block(self, start: int, stop: int) -> None:
        step = self._scratch[: stop - start]
        self.direction(start, stop, step)
        self.apply_step(start, stop, step, step)

    def direction(self, start: int, stop: int, step: Float32) -> None:
        """Write the new b of elements [start, stop), and D + mu*b to step (stop - start,)."""
        d, b = self._out[start:stop], self._after[start:stop]
        if self._before is None:
            b.fill(0)
        else:
            np.multiply(self._before[start:stop], self._mu, out=b)
        np.add(b, d, out=b)
        np.multiply(b, self._mu, out=step)
        np.add(step, d, out=step)


def matrix_elements(layout: FragmentLayout) -> int:
    """Return the number of elements of all the fragment's tensors that are orthogonalised."""
    return sum(slot.stop - slot.start for slot in layout.slots if slot.tensor.matrix)


def with_unit_norm(matrix: Float32) -> Float32 | None:
    """Return a matrix scaled to Frobenius length 1, transposed if it is taller than wide.

    Returns None if it is shorter than `_NO_DIRECTION` or its length is not finite.
    """
    with np.errstate(over="ignore"):
        length = math.sqrt(squares(np.ascontiguousarray(matrix).reshape(-1)))
    if not _NO_DIRECTION < length < math.inf:
        return None
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    if length > _LONGEST:  # and so beyond float32
        x, length = x / np.float32(_LONGEST), length / _LONGEST
    return np.asarray(x / np.float32(length), np.float32)


def halley_iteration(matrix: Float32) -> Float32:
    """Return a matrix (rows, columns) with the same singular vectors and flattened singular values.

    Up to one common factor, which is not determined, most of these are between 0.4 and 1. A matrix without direction
    is returned unchanged. `algorithm.HALLEY`'s x (a + b x^2) / (1 + c x^2) equals
    b/c (x + (ac/b - 1) x / (1 + c x^2)). For an n x n matrix that takes 3 2/3 n^3 operations: n^3 for the Gram matrix,
    which is symmetric, and the rest for the division. The products sum in an order that the machine's libraries choose.
    """
    x = with_unit_norm(matrix)
    if x is None:
        return matrix
    a, b, c = HALLEY
    gram = x @ x.T
    gram *= np.float32(c / math.sqrt(squares(gram.reshape(-1))))
    gram[np.diag_indices(len(gram))] += np.float32(1)
    turned = solve(gram, x)
    turned *= np.float32(a * c / b - 1)
    turned += x
    return turned if turned.shape == matrix.shape else turned.T


def solve(a: Float32, x: Float32) -> Float32:
    """Return a^-1 x (n, m) for a positive definite matrix a (n, n), in 2 n^2 m + 2/3 n^3 operations.

    The matrix is halved recursively, so that nearly all operations are in large products; numpy's own solver takes two
    and a half times as long. The result of each small inverse is refined once, because Halley's iteration multiplies
    its error by 89.
    """
    if len(a) <= _SOLVED_WHOLE:
        inverse = np.linalg.inv(a)
        whole = inverse @ x
        return np.asarray(whole + inverse @ (x - a @ whole), np.float32)
    half, columns = len(a) // 2, x.shape[1]
    first = solve(a[:half, :half], np.concatenate((x[:half], a[:half, half:]), axis=1))
    found = np.empty_like(x)
    rest = x[half:] - a[half:, :half] @ first[:, :columns]
    found[half:] = solve(a[half:, half:] - a[half:, :half] @ first[:, columns:], rest)
    np.subtract(first[:, :columns], first[:, columns:] @ found[half:], out=found[:half])
    return found


def matrix_blocks(
    layout: FragmentLayout, step: NesterovStep, found: Float32, recorded: Float32 | None = None
) -> Iterator[int]:
    """Take one outer step: `b = mu*b + D; theta -= lr*O(D + mu*b)`, where O orthogonalises each matrix.

    O keeps the Frobenius length of a matrix. For a tensor that is not a matrix O(x) = x, as in `NesterovStep`.

    Args:
        found: (matrix elements,), overwritten with O(D + mu*b) of the matrices, one after another, as computed here.
        recorded: `found` of an earlier step, to step by instead of what is computed here (for a replay).

    Yields:
        The end of each block that is final, from front to back.
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
        np.copyto(direction, with_norm_of(halley_iteration(matrix), matrix))
        taken = direction if recorded is None else recorded[part]
        step.apply_step(slot.start, slot.stop, taken, np.empty_like(taken))
        yield slot.stop
        done = part.stop


def with_norm_of(turned: Float32, matrix: Float32) -> Float32:
    """Return `turned` scaled to the Frobenius length of `matrix`, both (rows, columns), as a flat vector."""
    flat = np.ascontiguousarray(turned).reshape(-1)
    with np.errstate(over="ignore"):  # an infinite outcome is refused by `finite`
        length, now = math.sqrt(squares(matrix.reshape(-1))), math.sqrt(squares(flat))
        scaled: Float32 = np.multiply(flat, np.float32(length / now if now else 0.0))
    return scaled


# --- the step of a fragment ------------------------------------------------------------------------------


class State(NamedTuple):
    """Values and outer momentum of a fragment at one version."""

    theta: Float32
    """(elements,)"""
    momentum: Float32 | None
    """(elements,); None stands for zeros."""


class Recorded(NamedTuple):
    """Results of an earlier step that a replay reuses, since their summation order depends on the machine."""

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
    """(matrix elements,): `found` of `matrix_blocks`; None for a step that orthogonalises nothing."""
    norm: float
    """L2 norm of the step: theta after it minus theta before."""
    sample: Float32
    """The pseudogradient at the elements `at` of the `OuterStep`."""


class OuterStep:
    """One outer step (paper: RDA, outer optimizer), which is taken once. Its payloads are there from the start."""

    def __init__(
        self,
        total: Sum,
        contributions: Contributions,
        sync: SyncSpec,
        outer: Outer,
        before: State,
        grown: Grown = do_nothing,
        at: Sequence[int] | npt.NDArray[np.int64] = (),
    ) -> None:
        """Allocate what the step writes, in addition to the sum's memory.

        Args:
            total: has the first of the contributions, or none; overwritten by the step.
            grown: called by the thread that takes the step, when more chunks of any payload are whole.
            at: ascending numbers of the elements whose pseudogradient is kept (`Stepped.sample`).
        """
        self._sum, self._contributions, layout = total, contributions, total.layout
        theta, values, (lr, mu) = before.theta, total.values, outer
        # A step that only averages keeps no momentum: the next step with momentum starts from zeros.
        self._momentum = pooled(layout.elements, np.float32) if mu else None
        self._matrices: tuple[NesterovStep, Float32] | None = None
        self._step: PlainStep
        if self._momentum is not None:
            self._step = step = NesterovStep(theta, values, lr, mu, before.momentum, self._momentum)
            if sync.outer == "halley" and (elements := matrix_elements(layout)):
                self._matrices = step, np.empty(elements, np.float32)
        elif layout.averaged:
            self._step = AveragingStep(layout, theta, values)
        else:
            self._step = PlainStep(theta, values, lr)
        self.growing = GrowingGlobal(values, self._momentum, sync, grown)
        self._at = np.asarray(at, np.int64)
        self._sample = np.empty(len(self._at), np.float32)

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
            self._keep(0, self._sum.layout.elements)
            for stop in matrix_blocks(self._sum.layout, step, found, orthogonal):
                self.growing.grow_to(stop)
        made = self._sum.values, self._momentum, self.growing.digest, reduced, found
        return Stepped(*made, math.sqrt(self._step.squares), self._sample)

    def _keep(self, start: int, stop: int) -> None:
        """Keep the sampled elements of [start, stop), before the step overwrites them."""
        part = slice(*np.searchsorted(self._at, (start, stop)))
        self._sample[part] = self._sum.values[self._at[part]]

    def _block(self, start: int, stop: int) -> None:
        self._keep(start, stop)
        self._step.block(start, stop)
        self.growing.grow_to(stop)
