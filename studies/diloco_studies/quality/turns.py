"""Directions that the matrices of an outer step may take, tried beside production's (`merging.outer`). Pure numpy.

Each takes a matrix (rows, columns), and the number of the outer step plus the matrix's own, by which some take turns.
A direction may have any length: the step has the one that the matrix had.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from diloco.syncer.merging.outer import halley_iteration
from diloco_studies.quality.settings import Turned

Float32 = npt.NDArray[np.float32]
Turn = Callable[[Float32, int], Float32]


def wide(turn: Callable[[Float32], Float32]) -> Turn:
    """Of a matrix that has no fewer columns than rows; others are transposed before it and after it."""

    def either(matrix: Float32, number: int) -> Float32:
        tall = matrix.shape[0] > matrix.shape[1]
        turned = np.asarray(turn(np.ascontiguousarray(matrix.T) if tall else matrix), np.float32)
        return turned.T if tall else turned

    return either


def halves(x: Float32) -> Float32:
    """The upper and the lower half of the rows by themselves, each with all singular values alike."""
    return np.concatenate([_alike(half) for half in np.array_split(x, 2)])


def gram_schmidt(x: Float32) -> Float32:
    """Each row without its part along the rows above it, all of one length: the Q of a QR decomposition."""
    q, r = np.linalg.qr(x.T.astype(np.float64))
    return np.asarray((q * np.where(np.diag(r) < 0, -1, 1)).T, np.float32)


def clipped(share: int) -> Callable[[Float32], Float32]:
    """The largest singular values cut to the root mean square of the others; 1/share of them is looked for.

    They are found from sums of so many rows each, of either sign, times X^T (Halko et al., Finding structure with
    randomness, 2011). So those that stand out least are cut in part.
    """

    def turn(x: Float32) -> Float32:
        rows = len(x)
        count = max(1, rows // share)
        sketch = np.zeros((count, rows), np.float32)
        sketch[np.arange(rows) % count, np.arange(rows)] = 1 - 2.0 * ((np.arange(rows) * 2654435761 >> 7) & 1)
        basis = np.linalg.qr((sketch @ x @ x.T).T)[0].T
        part = basis @ x
        squared, turned = np.linalg.eigh(part.astype(np.float64) @ part.T.astype(np.float64))
        squared = np.maximum(squared, 1e-30)
        rest = (float(np.sum(np.square(x, dtype=np.float64))) - squared.sum()) / max(1, rows - count)
        cut = np.minimum(1, np.sqrt(max(rest, 1e-6 * squared[-1]) / squared)) - 1
        return np.asarray(x + basis.T @ (((turned * cut) @ turned.T) @ part), np.float32)

    return turn


def by_turns(second: Turn) -> Turn:
    """Halley's iteration for every other matrix and step; the others as told."""
    return lambda matrix, number: halley_iteration(matrix) if number % 2 else second(matrix, number)


def _alike(x: Float32) -> Float32:
    left, _, right = np.linalg.svd(x, full_matrices=False)
    return np.asarray(left @ right, np.float32)


TURNS: Mapping[Turned, Turn] = {
    "halves": wide(halves),
    "gram-schmidt": wide(gram_schmidt),
    "clipped": wide(clipped(4)),
    "by-turns": by_turns(lambda matrix, number: matrix),
    "by-turns-clipped": by_turns(wide(clipped(8))),
}
