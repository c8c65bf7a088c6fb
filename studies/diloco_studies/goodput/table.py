"""Cells of a table: which there are, and what a row says of its seeds. Pure."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from diloco_studies.goodput.figures import paper
from diloco_studies.goodput.fleet import Method, Run


class Cell(NamedTuple):
    """One method at one size."""

    method: Method
    learners: int
    chips: int


def cells(chips: Sequence[int], learners: Sequence[int]) -> list[Cell]:
    """The table's: two data-parallel rows, and both kinds of DiLoCo for every M; the slowest cells first."""
    single: list[Cell] = [Cell(method, 1, n) for method in ("data-parallel", "elastic") for n in chips]
    several = [Cell(method, m, n) for method in ("diloco", "decoupled") for m in learners for n in chips]
    return [*single, *several]


def row(cell: Cell, runs: Sequence[Run]) -> dict[str, Any]:
    """A cell's figures over its seeds; None where there are none: the paper's goodput, learners of too few merges."""
    window_keys = sorted({key for run in runs for key in run.windows})
    windows = {key: fmean(run.windows[key] for run in runs if key in run.windows) for key in window_keys}
    return {
        "method": cell.method,
        "learners": cell.learners,
        "chips": cell.chips,
        "goodput": fmean(run.goodput for run in runs),
        "goodput_stderr": standard_error([run.goodput for run in runs]),
        "uptime": fmean(run.uptime for run in runs),
        "uptime_stderr": standard_error([run.uptime for run in runs]),
        "longest_stall_s": max(run.longest_stall_s for run in runs),
        "mean_participants": windows.pop("mean_participants", 1.0 if cell.learners == 1 else None),
        "paper": paper(*cell),
        "lost": {cause: fmean(run.lost.get(cause, 0.0) for run in runs) for cause in causes(runs)},
        **windows,
    }


def standard_error(values: Sequence[float]) -> float:
    """Of their mean; 0 for one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def causes(runs: Sequence[Run]) -> list[str]:
    """All causes of lost time, in order of appearance."""
    return list(dict.fromkeys(cause for run in runs for cause in run.lost))
