"""Fits the free constants to columns of the paper's table, but for those that are held out. Pure.

What is fitted is run time, 1/goodput: the time that a job needs for the same work. Least squares, Gauss-Newton with
step control, on the logarithms of the constants. Every evaluation draws the same random numbers, so that the fit sees
the constants and not the noise.
"""

from collections.abc import Callable, Iterable

import numpy as np

from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.figures import HELD_OUT, TABLE, Figure
from diloco_studies.goodput.fleet import jobs, together
from diloco_studies.goodput.traces import Floats

FREE = ("gather", "down", "restart")
"""The constants that are fitted; `up` is kept equal to `down`, `repair_mean` as it is (docs/results/simulator.md)."""
START = (5.0, 10.0, 30.0)
_SMALL = 0.02
_DAMPING = (1.0, 0.5, 0.25, 0.1)
_ENOUGH = 1e-7


def with_free(constants: Constants, values: Iterable[float]) -> Constants:
    """The constants with the free ones replaced."""
    changes = dict(zip(FREE, (round(float(value), 3) for value in values), strict=True))
    return constants.model_copy(update={**changes, "up": changes["down"]})


def goodput_of(constants: Constants, figure: Figure, days: float, seed: int) -> float:
    """A cell's goodput; common random numbers for all constants."""
    rng = np.random.default_rng([seed, figure.chips, figure.learners, 7])
    made = jobs(constants, figure.chips, figure.learners, days, rng, rigid=figure.method == "data-parallel")
    return together(made)[0]


def calibrate(
    constants: Constants,
    days: float = 10.0,
    seed: int = 0,
    rounds: int = 8,
    told: Callable[[str], None] = lambda _: None,
    held_out: int = HELD_OUT,
) -> Constants:
    """The constants with the best free ones.

    Args:
        constants: those that stay.
        days: simulated for each cell and evaluation.
        seed: of the common random numbers.
        rounds: at most.
        told: gets a line a round.
        held_out: chips of the column that the fit does not see.
    """
    figures = [figure for figure in TABLE if figure.chips != held_out]

    def residuals(logs: Floats) -> Floats:
        tried = with_free(constants, np.exp(logs))
        return np.array([1 / goodput_of(tried, f, days, seed) - 1 / f.goodput for f in figures])

    here = np.log(np.array(START))
    found = residuals(here)
    for number in range(rounds):
        slopes = np.column_stack([(residuals(here + _SMALL * unit) - found) / _SMALL for unit in np.eye(len(FREE))])
        step = np.clip(np.linalg.lstsq(slopes, -found, rcond=None)[0], -1.0, 1.0)
        tries = ((here + share * step, residuals(here + share * step)) for share in _DAMPING)
        better = next(((at, r) for at, r in tries if r @ r < found @ found), None)
        if better is None or found @ found - better[1] @ better[1] < _ENOUGH:
            break
        here, found = better
        values = ", ".join(f"{name} {value:.2f} s" for name, value in zip(FREE, np.exp(here), strict=True))
        told(f"round {number + 1}: {values}; rms of 1/goodput {np.sqrt((found @ found) / found.size):.4f}")
    return with_free(constants, np.exp(here))
