"""The paper's figures (arXiv:2604.21428), as far as its readers agree on them. Pure data."""

from typing import NamedTuple

from diloco_studies.goodput.fleet import Method


class Figure(NamedTuple):
    """One cell of the paper's table."""

    method: Method
    learners: int
    chips: int
    goodput: float


CHIPS = (150_000, 600_000, 1_200_000)
"""Of the table's columns."""
_ROWS: tuple[tuple[Method, int, tuple[float, float, float]], ...] = (
    ("data-parallel", 1, (0.72, 0.38, 0.27)),
    ("elastic", 1, (0.88, 0.69, 0.58)),
    ("decoupled", 2, (0.94, 0.80, 0.70)),
    ("decoupled", 4, (0.96, 0.89, 0.82)),
    ("decoupled", 8, (0.98, 0.94, 0.88)),
    ("decoupled", 16, (0.99, 0.96, 0.93)),
)
TABLE = tuple(
    Figure(method, learners, chips, goodput)
    for method, learners, row in _ROWS
    for chips, goodput in zip(CHIPS, row, strict=True)
)
HELD_OUT = 600_000
"""Chips of the column that the default constants have not seen: it is for checking."""


def paper(method: str, learners: int, chips: int) -> float | None:
    """Goodput of a cell, if the paper has it."""
    return next((f.goodput for f in TABLE if (f.method, f.learners, f.chips) == (method, learners, chips)), None)
