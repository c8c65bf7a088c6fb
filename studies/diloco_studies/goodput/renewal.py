"""What the simulation must meet where formulas hold: renewal theory of one job. Pure.

Events come at a rate r in wall time. From the end of a pause it takes 1/r until the first event and `gather` more until
the pause it begins, of mean length D: the job trains for 1/r + gather of every 1/r + gather + D.
"""

import numpy as np

from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.strikes import repair_cdf

_POINTS = 40_001


def trained_share(rate_per_s: float, gather_s: float, pause_s: float) -> float:
    """Share of the time in which a job trains.

    Args:
        rate_per_s: events that begin a pause.
        gather_s: training time between the first and the pause.
        pause_s: mean length of a pause.
    """
    return 1.0 / (1.0 + rate_per_s * pause_s / (1.0 + rate_per_s * gather_s))


def elastic(constants: Constants, chips: float) -> float:
    """Trained share of an elastic job whose pauses have one length; slices away are not taken off.

    Holds where interruptions and returns are independent, that is where repairs vary by more than a pause.
    """
    if constants.down != constants.up or constants.detect:
        raise ValueError("the formula needs pauses of one length: down = up, detect = 0")
    return trained_share(2.0 * chips / constants.mtbi, constants.gather, constants.down)


def rigid(constants: Constants, chips: float) -> float:
    """Trained share of a job without elasticity and checkpoints; slices away before a pause are not taken off."""
    rate = chips / constants.mtbi
    return trained_share(rate, constants.gather, constants.detect + mean_wait_s(constants, rate) + constants.restart)


def mean_wait_s(constants: Constants, rate_per_s: float) -> float:
    """Mean time from the pause's beginning until the last of those struck is back.

    The first was struck `gather` before; n more, n Poisson of mean rate x gather, uniformly in between.
    """
    g, dead = constants.gather, constants.gather + constants.detect
    far = dead + 1.0
    while repair_cdf(constants, np.array([far]))[0] < 1.0 - 1e-9:
        far *= 1.5
    t = dead + (far - dead) * np.linspace(0.0, 1.0, _POINTS) ** 2
    first = repair_cdf(constants, t)
    if g == 0:
        return float(np.trapezoid(1.0 - first, t))
    # Of those struck in between, the share not back at t, averaged over when: (1/g) * integral of 1 - F(t - u).
    fine = np.linspace(0.0, far, 4 * _POINTS)
    missing = 1.0 - repair_cdf(constants, fine)
    whole = np.concatenate([[0.0], np.cumsum((missing[1:] + missing[:-1]) / 2 * np.diff(fine))])
    late = np.interp(t, fine, whole) - np.interp(t - g, fine, whole)
    return float(np.trapezoid(1.0 - first * np.exp(-rate_per_s * late), t))
