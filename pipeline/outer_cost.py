"""What an outer step costs: operations of its products of matrices, and the seconds that they take. Pure.

One count for all who ask: the planner (`needs`), the syncer before its first merge, the simulator.
"""

import math
from collections.abc import Iterable
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


CHEAPER = (
    "--outer nesterov --outer-momentum 0.5, and outer_warmup = 24, which multiplies no matrices but ended 4 to "
    "5 % higher in held-out loss (docs/results/quality.md)"
)
"""What to take instead of an outer step that takes too long, and what that costs."""


def matrix_operations(rows: float, columns: float, outer: OuterName) -> float:
    """Operations of one outer step of a matrix (rows, columns), without what is done to each element once.

    Halley: X X^T at half the work of a product, and a division by halves; 3.7 n^3 for n x n, which take as long as 5.6
    n^3 in large products would (docs/results/outer-step.md).
    """
    few, many = min(rows, columns), max(rows, columns)
    return 1.5 * (3 * few**2 * many + 0.7 * few**3) if outer == "halley" else 0.0


def operations_of(tensors: Iterable[TensorSpec], outer: OuterName) -> float:
    """The same of all tensors that a spec takes for matrices."""
    shapes = [tensor.shape for tensor in tensors if tensor.matrix]
    return math.fsum(matrix_operations(rows, columns, outer) for rows, columns in shapes)


def transformer_operations(width: float, layers: float, outer: OuterName) -> float:
    """The same of a transformer: a layer has four matrices n x n and two n x 4n, so 12 n^2 parameters."""
    square, wide = matrix_operations(width, width, outer), matrix_operations(width, 4 * width, outer)
    return layers * (4 * square + 2 * wide)
