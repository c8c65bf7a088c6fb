"""The inner learning rate by the run's progress, for any model and optimizer. Pure.

Steps differ among learners, and a restarted one counts anew: the run's trained tokens of its budget are what all of
them know. Warm-up and cosine are the built-in trainer's.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import TrainerSettings, defaults
from diloco.workers.trainer.schedule import learning_rate

At = tuple[float, int, int]
"""Progress in 0..1, own steps, steps of a ramp."""
Shape = Literal["cosine", "linear", "constant"]
WARMUP: float = defaults(TrainerSettings)["warmup"]
"""Share of the run's progress, as in the built-in trainer."""


class ShareByProgress:
    """What torch's LambdaLR asks for the share of the peak: by the run's progress, whatever number of step it says.

    A copy, also a pickled one, has no learner, and stays at the progress at which it was made. A scheduler's state
    dict has nothing of it: `__dict__` is empty.
    """

    __slots__ = ("__dict__", "_at", "_curve", "_share")

    def __init__(self, curve: tuple[Shape, float, float, float], at: Callable[[], At] | At) -> None:
        """Of a curve and a place on it.

        curve: as `share_by_progress` takes it; at: where the run is, or what is called for it.

        Raises:
            UsageError: as `share_by_progress`.
        """
        self._curve, self._share, self._at = curve, share_by_progress(*curve), at

    def __call__(self, step: int) -> float:
        """Share of the peak now; step: not looked at."""
        return self._share(*self._now())

    def __reduce__(self) -> tuple[Any, ...]:
        return ShareByProgress, (self._curve, self._now())

    def _now(self) -> At:
        return self._at() if callable(self._at) else self._at


def share_by_progress(shape: Shape, warmup: float, decay: float, final: float) -> Callable[[float, int, int], float]:
    """What gives the share of the peak at a progress in 0..1, after so many own steps, with a ramp of so many.

    Args:
        shape: after the warm-up: a cosine or a straight line to `final`; or the peak, and a straight line to `final`
            in the last part of the run (warm-up, stable, decay).
        warmup: share of the run's progress.
        decay: length of that last part, as share of the run's progress.
        final: share of the peak at progress 1.

    Raises:
        UsageError: naming what is out of bounds.
    """
    if shape not in get_args(Shape):
        raise UsageError(f"progress_schedule(shape={shape!r}): one of {', '.join(get_args(Shape))}")
    for name, value, most in (("warmup", warmup, 1.0), ("decay", decay, 1.0), ("final", final, 1.0)):
        if not 0.0 <= value <= most or (name == "warmup" and value == most):
            below = "less than 1" if name == "warmup" else "at most 1"
            raise UsageError(f"progress_schedule({name}={value!r}): from 0, and {below}")
    begin = {"linear": warmup, "constant": max(warmup, 1.0 - decay)}.get(shape)

    def share(progress: float, own_steps: int, ramp_steps: int) -> float:
        full = {"own_steps": own_steps, "ramp_steps": ramp_steps}
        if begin is None or progress < warmup:
            return learning_rate(progress, peak=1.0, min_ratio=final, warmup=warmup, **full)
        fallen = max(0.0, progress - begin) / (1.0 - begin) if begin < 1.0 else 0.0
        ramp = learning_rate(0.0, peak=1.0, min_ratio=1.0, warmup=0.0, **full)
        return ramp * (1.0 - (1.0 - final) * min(1.0, fallen))

    return share
