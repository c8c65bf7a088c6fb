"""How long a window may wait for stragglers. Pure: no clock.

`algorithm.grace` is the paper's formula; here are the smoothed times that go into it. Nothing here makes a learner
wait: too long a grace only makes learners train more steps on their old base.
"""

from collections.abc import Sequence
from statistics import median_low

from diloco.pipeline.ema import Ema
from diloco.syncer import algorithm

DECAY = 0.8
"""Share of the old estimate that each observation leaves; the paper smooths, the decay is not published."""

SLOWEST_FACTOR = 10.0
"""A step time counts up to so many times the median: no learner's word alone stretches a window."""


class GraceEstimator:
    """Estimates of one fragment: quorum time, and sync time as far as the syncer sees it: to the commit's answer."""

    def __init__(self) -> None:
        self._quorum = Ema(DECAY)
        self._sync = Ema(DECAY)
        self._hidden_s = 0.0
        """Tau steps, as last known; nothing counts for longer."""

    def observe(self, quorum_s: float, sync_s: float, step_times: Sequence[float], overlap_steps: int) -> None:
        """The times of one window.

        Each counts for tau steps at most: those leave no slack, and how much longer it took says nothing of the windows
        to come. So they have their grace after a night without a quorum, or when a syncer was suspended in a merge.

        Args:
            quorum_s: from its opening to the K-th header.
            sync_s: the syncer's part of a sync time: uploads, merge, outer step and commit.
            step_times: as of `grace_s`; if none is known, it is as it was.
            overlap_steps: the same.
        """
        if (slowest := _slowest(step_times)) is not None:
            self._hidden_s = overlap_steps * slowest
        self._quorum.observe(min(quorum_s, self._hidden_s))
        self._sync.observe(min(sync_s, self._hidden_s))

    def grace_s(
        self,
        step_times: Sequence[float],
        pull_times: Sequence[float],
        overlap_steps: int,
        gamma: float,
        control_latency_s: float,
        stretched: bool = False,
    ) -> float | None:
        """Length of the grace window, or None before the first estimates exist.

        The step time in the slack is the slowest expected learner's: grace is there for stragglers, and one
        measured in the steps of the fastest would close on mixed hardware before a straggler's next step
        boundary, where alone it can follow. For the same reason nothing is gained by waiting longer than one
        such step, as long as it may be, and the latency of a header: that is the cap.

        The sync time ends when learners have the global, as the paper's does. How long a pull takes only they know,
        and the lower median of what they say counts: one word alone shortens a grace no more than it stretches it.

        A stretched interval has the round trip in it, the grace too, by the shorter of the last two. Smoothed times are
        now above it and now below. Were they taken off once more, every other window would close without a grace, and
        whoever missed it would lose a long interval's work. So only the cap is left there.

        Args:
            step_times: compute step time of each expected learner, s; 0.0 is not known yet and is ignored.
            pull_times: from a head to the fragment's global pulled, of each expected learner, s; 0.0 before its first.
            overlap_steps: tau in force (`ramps.overlap_in_force`).
            gamma: share of the slack, below 1.
            control_latency_s: from a learner's decision to follow to its header at the syncer.
            stretched: the interval was made longer than planned, by the round trip (`ramps.is_stretched`).

        Returns:
            Seconds, 0 or more; None if no step time, quorum time or sync time is known.
        """
        slowest = _slowest(step_times)
        if slowest is None or self._quorum.value is None or self._sync.value is None:
            return None
        if stretched:
            return algorithm.grace(slowest, 0.0, 0.0, overlap_steps, gamma, control_latency_s)
        sync = self._sync.value + (median_low(pull_times) if pull_times else 0.0)
        return algorithm.grace(slowest, self._quorum.value, sync, overlap_steps, gamma, control_latency_s)


def _slowest(step_times: Sequence[float]) -> float | None:
    """The step time by which a window waits, s; None if none is known."""
    known = [s for s in step_times if s > 0]
    return min(max(known), SLOWEST_FACTOR * median_low(known)) if known else None
