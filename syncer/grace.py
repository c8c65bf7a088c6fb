"""How long a window may wait, for stragglers and for uploads; how long merges and round trips took. Pure: no clock.

`algorithm.grace` is the paper's formula; here are the smoothed times that go into it. Nothing here makes a learner
wait: too long a grace only makes learners train more steps on their old base.
"""

from collections.abc import Sequence
from statistics import median, median_low

from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.ramps import interval_at
from diloco.syncer import algorithm

DECAY = 0.8
"""Share of the old estimate that each observation leaves; the paper smooths, the decay is not published."""

SLOWEST_FACTOR = 10.0
"""A step time counts up to so many times the median: no learner's word alone stretches a window."""

MOST_STEPS = 10**6
"""The longest interval."""

FIRST_UPLOAD_S = 30.0
"""Upload deadline before any upload was measured."""
LEAST_UPLOAD_S = 1.0
"""Time for a learner whose machine is busy; also how long one killed while publishing can hold up a merge."""
UPLOAD_FACTOR = 4.0
"""The upload deadline is this many times the smoothed upload time."""
TIMEOUT_FACTOR = 2.0
"""Uploads that did not end in time lengthen the deadline to so many times what it was at most."""


class Ema:
    """Exponential moving average that starts at its first observation."""

    def __init__(self, decay: float = DECAY) -> None:
        self.decay = decay
        self.value: float | None = None

    def observe(self, value: float) -> None:
        """Take one observation in."""
        self.value = value if self.value is None else self.decay * self.value + (1 - self.decay) * value


class GraceEstimator:
    """Estimates of one fragment: quorum time, and sync time as far as the syncer sees it: to the commit's answer."""

    def __init__(self, decay: float = DECAY) -> None:
        self._quorum = Ema(decay)
        self._sync = Ema(decay)

    def observe_quorum(self, seconds: float) -> None:
        """A window's quorum time: from its opening to the K-th header."""
        self._quorum.observe(seconds)

    def observe_sync(self, seconds: float) -> None:
        """The syncer's part of a sync time: uploads, merge, outer step and publication of one window."""
        self._sync.observe(seconds)

    def grace_s(
        self,
        step_times: Sequence[float],
        pull_times: Sequence[float],
        overlap_steps: int,
        gamma: float,
        control_latency_s: float,
    ) -> float | None:
        """Length of the grace window, or None before the first estimates exist.

        The step time in the slack is the slowest expected learner's: grace is there for stragglers, and one
        measured in the steps of the fastest would close on mixed hardware before a straggler's next step
        boundary, where alone it can follow. For the same reason nothing is gained by waiting longer than one
        such step, as long as it may be, and the latency of a header: that is the cap.

        The sync time ends when learners have the global, as the paper's does. How long a pull takes only they know,
        and the lower median of what they say counts: one word alone shortens a grace no more than it stretches it.

        Args:
            step_times: compute step time of each expected learner, s; 0.0 is not known yet and is ignored.
            pull_times: from a head to the fragment's global pulled, of each expected learner, s; 0.0 before its first.
            overlap_steps: tau in force (`ramps.overlap_in_force`).
            gamma: share of the slack, below 1.
            control_latency_s: from a learner's decision to follow to its header at the syncer.

        Returns:
            Seconds, 0 or more; None if no step time, quorum time or sync time is known.
        """
        known = [s for s in step_times if s > 0]
        if not known or self._quorum.value is None or self._sync.value is None:
            return None
        slowest = min(max(known), SLOWEST_FACTOR * median_low(known))
        sync = self._sync.value + (median_low(pull_times) if pull_times else 0.0)
        return algorithm.grace(slowest, self._quorum.value, sync, overlap_steps, gamma, control_latency_s)


class UploadEstimator:
    """Estimate of one fragment's upload time: how long the uploads of a window's fixed set may take."""

    def __init__(self) -> None:
        self._upload = Ema()

    @property
    def upload_s(self) -> float:
        """How long the uploads of a fixed set may take."""
        measured = self._upload.value
        return FIRST_UPLOAD_S if measured is None else max(LEAST_UPLOAD_S, UPLOAD_FACTOR * measured)

    def observe(self, seconds: float) -> None:
        """An upload has ended."""
        self._upload.observe(seconds)

    def timed_out(self, waited_s: list[float]) -> None:
        """These did not end in time: a slower network must lengthen the deadline, or nothing would ever pass."""
        most = TIMEOUT_FACTOR * self.upload_s / UPLOAD_FACTOR
        for seconds in waited_s:
            self._upload.observe(min(seconds, most))


class RoundTrips:
    """How many steps the last two of one fragment took.

    A learner goes on training on its base until what it published is merged and here, and adopts that after a step. All
    of these steps are overwritten. `stretched` makes intervals longer by them.
    """

    def __init__(self) -> None:
        self._took = (0.0, 0.0)

    def took(self, seconds: float) -> None:
        """One more: quorum time, grace, and sync time of one window, the pull in it."""
        self._took = self._took[1], seconds

    def steps(self, step_times: Sequence[float], latency_s: float) -> float:
        """The step in which a learner adopts, and what passes besides; 0: not known yet.

        The shorter one of the last two counts, so that one hold-up is no sign.

        Args:
            step_times: of the learners that were merged, s; 0 is not known yet.
            latency_s: from a learner's decision to publish to its header at the syncer.
        """
        known, round_trip_s = [s for s in step_times if s > 0], min(self._took)
        return 1 + (round_trip_s + latency_s) / median(known) if known and round_trip_s else 0.0


def stretched(sync: SyncSpec, version: int, round_trip: float) -> int:
    """`ramps.interval_at`, made longer where round trips take long.

    What is trained in a round trip is overwritten. It is no greater a share than where a round trip takes one step; and
    once the interval is H, no greater a share than tau of H.

    Args:
        sync: tau, and what `ramps.interval_at` needs; tau of 0 counts as 1 here.
        version: of the base.
        round_trip: steps (`RoundTrips`).
    """
    interval = interval_at(sync, version)
    hides = min(interval, sync.sync_interval / max(1, sync.overlap_steps))
    return min(MOST_STEPS, max(interval, int(hides * round_trip)))


class LastMerges:
    """How long the last two merges of one fragment took; the shorter one counts, so that one hold-up is no sign."""

    def __init__(self, expected_outer_s: float = 0.0) -> None:
        """expected_outer_s: what the outer step should take, as reckoned before the first one."""
        self._took = (0.0, 0.0)
        self._outer: tuple[float, ...] = ()
        self._expected_outer_s = expected_outer_s

    def took(self, merge_s: float, outer_s: float | None = None) -> None:
        """One more. outer_s: of it, sum and outer step alone; None: it only averaged, which tells nothing of a step."""
        self._took = self._took[1], merge_s
        if outer_s is not None:
            self._outer = *self._outer[-1:], outer_s

    @property
    def merge_s(self) -> float:
        """As `WindowView.merge_s`: the shorter of them; 0 before there are two."""
        return min(self._took)

    @property
    def measured(self) -> bool:
        """Whether `outer_s` is what steps took, not what they should."""
        return len(self._outer) == 2

    @property
    def outer_s(self) -> float:
        """As `WindowView.outer_s`: the same of the outer step; what was expected before there are two."""
        return min(self._outer) if self.measured else self._expected_outer_s
