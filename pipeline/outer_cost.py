"""What an outer step costs: operations of its products of matrices, and the seconds that they take. Pure.

One count for all who ask: the planner (`needs`), the syncer before its first merge, the simulator.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.messages.wire import OuterName

CORE_FLOPS = 120e9
"""Operations of a core a second in products of matrices. Measured on a quiet one (docs/results/outer-step.md)"""


class Speed(NamedTuple):
    """How fast a machine multiplies matrices."""

    flops: float = CORE_FLOPS
    """Operations a second of one product."""
    at_once: int = 1
    """Products that go on beside each other at that speed."""
    threads: int = 1
    """That each of them takes."""


_OPERATIONS: dict[OuterName, Callable[[float, float], float]] = {
    "nesterov": lambda few, many: 0.0,
    "muon": lambda few, many: 5 * (4 * few**2 * many + 2 * few**3),
    "halley": lambda few, many: 1.5 * (3 * few**2 * many + 0.7 * few**3),
}
"""Operations of one outer step of a matrix with so many rows and columns, fewer first: the only place that counts them.

Muon: five iterations, each X X^T, its square and one more product (`syncer.merging.outer`), so 30 n^3 for n x n.
Halley: X X^T at half the work of a product, and a division by halves; 3.7 n^3, which take as long as 5.6 n^3 in large
products would (docs/results/outer-step.md).
"""
_NONE = (
    "--outer nesterov --outer-momentum 0.5, and outer_warmup = 24, which multiplies no matrices but ended 4 to "
    "5 % higher in held-out loss (docs/results/quality.md)"
)
CHEAPER: dict[OuterName, str] = {
    "muon": "--outer halley, which learns as well at a fifth of the time (docs/results/outer-step.md)",
    "halley": _NONE,
}
"""What to take instead of an outer step that takes too long, and what that costs."""


def matrix_operations(rows: float, columns: float, outer: OuterName) -> float:
    """Operations of one outer step of a matrix (rows, columns), without what is done to each element once."""
    return _OPERATIONS[outer](min(rows, columns), max(rows, columns))


def cheaper(outer: OuterName, times: float) -> str:
    """What to take instead of an outer step that takes so many times as long as it may."""
    less = matrix_operations(1, 1, outer) / matrix_operations(1, 1, "halley")
    return CHEAPER["muon" if outer == "muon" and times <= less else "halley"]


def operations_of(tensors: Iterable[TensorSpec], outer: OuterName) -> float:
    """The same of all tensors that a spec takes for matrices."""
    shapes = [tensor.shape for tensor in tensors if tensor.matrix]
    return math.fsum(matrix_operations(rows, columns, outer) for rows, columns in shapes)


def transformer_operations(width: float, layers: float, outer: OuterName) -> float:
    """The same of a transformer: a layer has four matrices n x n and two n x 4n, so 12 n^2 parameters."""
    square, wide = matrix_operations(width, width, outer), matrix_operations(width, 4 * width, outer)
    return layers * (4 * square + 2 * wide)
