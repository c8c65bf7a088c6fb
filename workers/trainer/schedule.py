"""The inner learning rate as a function of the run's progress and of this learner's own steps. Pure."""

import math

FRESH_MOMENTS_STEPS = 20
"""Ramp of an incarnation whose Adam moments are empty: its first updates are all sign and no scale."""

_FLOOR = 0.02
"""Least share of the peak during warm-up, so that the first steps of a run move at all."""


def learning_rate(
    progress: float,
    own_steps: int,
    *,
    peak: float,
    min_ratio: float,
    warmup: float,
    ramp_steps: int = FRESH_MOMENTS_STEPS,
) -> float:
    """Learning rate of the next inner step.

    Linear warm-up until `progress` = `warmup`, then a cosine to `min_ratio * peak` at progress 1. Progress, not
    steps, since learners differ in steps. One that begins with fresh moments also ramps up over its own first steps.

    Args:
        progress: trained tokens of the run / budget, 0..1.
        own_steps: inner steps this learner's moments are known to have gathered.
        peak: highest learning rate.
        min_ratio: learning rate at the end, as share of the peak.
        warmup: share of the run's progress that is warm-up.
        ramp_steps: own steps until the full rate; 0 with a peer's moments.
    """
    if progress < warmup:
        share = max(_FLOOR, progress / warmup)
    else:
        done = min(1.0, (progress - warmup) / (1.0 - warmup))
        share = min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * share * (min(1.0, (own_steps + 1) / ramp_steps) if ramp_steps else 1.0)
