"""The cost of an outer step: floating-point operations of its matrix products, and the resulting seconds. Pure.

The planner (`needs`), the syncer (before its first merge) and the simulator all use this count.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.messages.wire import OuterName

# Operations per second of one core in large matrix products, as measured beside the outer step
# (docs/results/outer-step.md). An otherwise idle core reaches 120e9.
CORE_FLOPS = 100e9


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
    """Return the operations of large matrix products that take as long as one outer step of a matrix (rows, columns).

    Halley's step itself has 3 few^2 many + 2/3 few^3 operations. Its products are smaller and its copies cost time, so
    that it takes as long as 5.5 few^2 many, whether the matrix is square or wide (docs/results/outer-step.md).
    """
    few, many = min(rows, columns), max(rows, columns)
    return 5.5 * few**2 * many if outer == "halley" else 0.0


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
