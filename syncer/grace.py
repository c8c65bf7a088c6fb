"""The grace window's length (paper, adaptive grace window; arXiv:2604.21428). Pure: times come in as numbers, no clock.

slack = tau * step_time - (quorum_time + sync_time) is the compute time that still hides a sync; a share gamma
of it may be spent waiting for stragglers. Nothing here makes a learner wait: too long a grace only makes
learners train more steps on their old base.
"""

from collections.abc import Sequence
from statistics import median_low

DECAY = 0.8
"""Share of the old estimate that each observation leaves; the paper smooths, the decay is not published."""

SLOWEST_FACTOR = 10.0
"""A step time counts up to so many times the median: no learner's word alone stretches a window."""


class Ema:
    """Exponential moving average that starts at its first observation."""

    def __init__(self, decay: float = DECAY) -> None:
        self.decay = decay
        self.value: float | None = None

    def observe(self, value: float) -> None:
        """Take one observation in."""
        self.value = value if self.value is None else self.decay * self.value + (1 - self.decay) * value


class GraceEstimator:
    """Estimates of one fragment: quorum time and sync time."""

    def __init__(self, decay: float = DECAY) -> None:
        self._quorum = Ema(decay)
        self._sync = Ema(decay)

    def observe_quorum(self, seconds: float) -> None:
        """A window's quorum time: from its opening to the K-th header."""
        self._quorum.observe(seconds)

    def observe_sync(self, seconds: float) -> None:
        """A sync time: uploads, merge, outer step and publication of one window."""
        self._sync.observe(seconds)

    def grace_s(
        self, step_times: Sequence[float], overlap_steps: int, gamma: float, control_latency_s: float
    ) -> float | None:
        """Length of the grace window, or None before the first estimates exist.

        The step time in the slack is the slowest expected learner's: grace is there for stragglers, and one
        measured in the steps of the fastest would close on mixed hardware before a straggler's next step
        boundary, where alone it can follow. For the same reason nothing is gained by waiting longer than one
        such step and the latency of a header: that is the cap.

        Args:
            step_times: compute step time of each expected learner, s; 0.0 is not known yet and is ignored.
            overlap_steps: tau.
            gamma: share of the slack, below 1.
            control_latency_s: from a learner's decision to follow to its header at the syncer.

        Returns:
            Seconds, 0 or more; None if no step time, quorum time or sync time is known.
        """
        known = [s for s in step_times if s > 0]
        slowest = min(max(known), SLOWEST_FACTOR * median_low(known)) if known else None
        if slowest is None or self._quorum.value is None or self._sync.value is None:
            return None
        slack = overlap_steps * slowest - (self._quorum.value + self._sync.value)
        return max(0.0, min(gamma * slack, slowest + control_latency_s))
