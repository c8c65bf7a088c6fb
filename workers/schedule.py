"""The inner learning rate as a function of the run's progress and of this learner's own steps. Pure."""

import math

# Ramp of an incarnation with empty Adam moments: its first updates are mere signs of the gradient, at full step size.
FRESH_MOMENTS_STEPS = 20

# Lowest share of the peak during warm-up, so that the first steps of a run move at all.
_FLOOR = 0.02


def learning_rate(
    progress: float,
    own_steps: int,
    *,
    peak: float,
    min_ratio: float,
    warmup: float,
    ramp_steps: int = FRESH_MOMENTS_STEPS,
) -> float:
    """Return the learning rate of the next inner step.

    The rate warms up linearly until `progress` = `warmup`, then follows a cosine to `min_ratio * peak` at progress 1.
    It depends on progress rather than steps, because learners differ in their steps. A learner that begins with fresh
    moments also ramps up over its own first steps.

    Args:
        progress: trained tokens of the run / budget, 0..1.
        own_steps: inner steps over which this learner's moments are known to have accumulated.
        peak: highest learning rate.
        min_ratio: learning rate at the end, as a share of the peak.
        warmup: share of the run's progress that is warm-up.
        ramp_steps: own steps until the full rate; 0 with a peer's moments.
    """
    if progress < warmup:
        share = max(_FLOOR, progress / warmup)
    else:
        done = min(1.0, (progress - warmup) / (1.0 - warmup))
        share = min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * share * (min(1.0, (own_steps + 1) / ramp_steps) if ramp_steps else 1.0)
