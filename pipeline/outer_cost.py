"""The cost of an outer step: floating-point operations of its matrix products, and the resulting seconds. Pure.

The planner (`needs`), the syncer (before its first merge) and the simulator all use this count.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.messages.wire import OuterName

# Operations per second of one core in matrix products, measured on an otherwise idle core (docs/results/outer-step.md).
CORE_FLOPS = 120e9


class Speed(NamedTuple):
    """How fast a machine multiplies matrices."""

    flops: float = CORE_FLOPS
    """Operations per second of one product."""
    at_once: int = 1
    """Products that can run in parallel at that speed."""
    threads: int = 1
    """Threads that each product uses."""


# The advice for an outer step that takes too long, with the quality that it costs.
CHEAPER = (
    "--outer nesterov, which multiplies no matrices, but ended with 5 % higher held-out loss (docs/results/quality.md)"
)


def matrix_operations(rows: float, columns: float, outer: OuterName) -> float:
    """Return the operations of one outer step of a matrix (rows, columns); elementwise work is not counted.

    Halley multiplies X X^T at half the cost of a full product, and divides by halves. For n x n that is 3.7 n^3
    operations, which take as long as 5.6 n^3 in large products would (docs/results/outer-step.md).
    """
    few, many = min(rows, columns), max(rows, columns)
    return 1.5 * (3 * few**2 * many + 0.7 * few**3) if outer == "halley" else 0.0


def operations_of(tensors: Iterable[TensorSpec], outer: OuterName) -> float:
    """Return the operations of one outer step of all tensors that the spec marks as matrices."""
    shapes = [tensor.shape for tensor in tensors if tensor.matrix]
    return math.fsum(matrix_operations(rows, columns, outer) for rows, columns in shapes)


def transformer_operations(width: float, layers: float, outer: OuterName) -> float:
    """Return the operations of one outer step of a transformer.

    A layer is counted as four n x n matrices and two n x 4n matrices, so it has 12 n^2 parameters.
    """
    square, wide = matrix_operations(width, width, outer), matrix_operations(width, 4 * width, outer)
    return layers * (4 * square + 2 * wide)
