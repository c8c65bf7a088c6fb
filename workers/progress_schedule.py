"""The inner learning rate as a function of the run's progress, for any model and optimizer. Pure.

Numbers of steps differ among learners, and a restarted learner counts from zero. The share of the budget that the run
has trained is what all of them know. Warm-up and cosine are those of the built-in trainer.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import TrainerSettings, defaults
from diloco.workers.schedule import learning_rate

At = tuple[float, int, int]  # progress in 0..1, own steps, steps of the ramp
Shape = Literal["cosine", "linear", "constant"]
# Share of the run's progress, as in the built-in trainer.
WARMUP: float = defaults(TrainerSettings)["warmup"]


class ShareByProgress:
    """The function for torch's LambdaLR: the share of the peak by the run's progress, ignoring the number of the step.

    A copy, even a pickled one, has no learner, and stays at the progress at which it was made. A scheduler's state dict
    contains nothing of it, because `__dict__` is empty.
    """

    __slots__ = ("__dict__", "_at", "_curve", "_share")

    def __init__(self, curve: tuple[Shape, float, float, float], at: Callable[[], At] | At) -> None:
        """Combine a curve with a place on it.

        Args:
            curve: the arguments of `share_by_progress`.
            at: the place, or a function that returns it.

        Raises:
            UsageError: see `share_by_progress`.
        """
        self._curve, self._share, self._at = curve, share_by_progress(*curve), at

    def __call__(self, step: int) -> float:
        """Return the share of the peak now; `step` is ignored."""
        return self._share(*self._now())

    def __reduce__(self) -> tuple[Any, ...]:
        return ShareByProgress, (self._curve, self._now())

    def _now(self) -> At:
        return self._at() if callable(self._at) else self._at


def share_by_progress(shape: Shape, warmup: float, decay: float, final: float) -> Callable[[float, int, int], float]:
    """Return a function of progress (0..1), own steps and steps of a ramp that gives the share of the peak.

    Args:
        shape: after the warm-up, "cosine" or "linear": falls to `final`; "constant": stays at the peak, and falls
            linearly to `final` in the last part of the run (warm-up, stable, decay).
        warmup: share of the run's progress.
        decay: length of the last part, as a share of the run's progress.
        final: share of the peak at progress 1.

    Raises:
        UsageError: names the argument that is out of bounds.
    """
    if shape not in get_args(Shape):
        raise UsageError(f"progress_schedule(shape={shape!r}): use one of {', '.join(get_args(Shape))}")
    for name, value, most in (("warmup", warmup, 1.0), ("decay", decay, 1.0), ("final", final, 1.0)):
        if not 0.0 <= value <= most or (name == "warmup" and value == most):
            below = "less than 1" if name == "warmup" else "at most 1"
            raise UsageError(f"progress_schedule({name}={value!r}): use a number of at least 0 and {below}")
    begin = {"linear": warmup, "constant": max(warmup, 1.0 - decay)}.get(shape)

    def share(progress: float, own_steps: int, ramp_steps: int) -> float:
        full = {"own_steps": own_steps, "ramp_steps": ramp_steps}
        if begin is None or progress < warmup:
            return learning_rate(progress, peak=1.0, min_ratio=final, warmup=warmup, **full)
        fallen = max(0.0, progress - begin) / (1.0 - begin) if begin < 1.0 else 0.0
        ramp = learning_rate(0.0, peak=1.0, min_ratio=1.0, warmup=0.0, **full)
        return ramp * (1.0 - (1.0 - final) * min(1.0, fallen))

    return share
