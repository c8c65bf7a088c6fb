"""How long merges and round trips of one fragment take, by the last two. Pure: no clock.

In both the shorter of the last two counts, so that a single delay has no effect.
"""

from collections.abc import Sequence
from statistics import median_high

from diloco.pipeline.pacing import known_steps


class RoundTrips:
    """Length of the last two round trips of one fragment, in learners' steps.

    After publishing, a learner trains on until the merge of its delta has been pulled, and adopts it after a step. The
    steps of this round trip are overwritten, and `ramps.stretched` lengthens intervals by them. The wait for a quorum
    is not part of the round trip: it depends on the other learners, not on the interval, and deltas are renewed
    meanwhile.
    """

    def __init__(self) -> None:
        self._took = (0.0, 0.0)

    def observe(self, seconds: float) -> None:
        """Take one window's grace and sync time (pull included), s."""
        self._took = self._took[1], seconds

    def steps(self, step_times: Sequence[float], latency_s: float) -> float:
        """Return the round trip in steps, including the step after which a learner adopts; 0 if it is not known yet.

        The shorter of the last two counts, so that a single delay has no effect.

        Args:
            step_times: of the learners that were merged lately, s. Values that are too short count as unknown. The
                higher median counts: of two learners, one that reports very short steps cannot stretch the interval.
            latency_s: from a learner's decision to publish to its header at the syncer.
        """
        known, round_trip_s = known_steps(step_times), min(self._took)
        return 1 + (round_trip_s + latency_s) / median_high(known) if known and round_trip_s else 0.0


class LastMerges:
    """Durations of one fragment's last two merges; the shorter one counts, so that a single delay has no effect."""

    def __init__(self, expected_outer_s: float = 0.0) -> None:
        """Begin without a merge; expected_outer_s is the calculated duration of the outer step, used until measured."""
        self._took = (0.0, 0.0)
        self._outer: tuple[float, ...] = ()
        self._expected_outer_s = expected_outer_s

    def observe(self, merge_s: float, outer_s: float | None = None) -> None:
        """Take one merge's duration, s.

        Args:
            merge_s: of the whole merge.
            outer_s: of the sum and the outer step in it; None if it only averaged, which tells nothing of a step.
        """
        self._took = self._took[1], merge_s
        if outer_s is not None:
            self._outer = *self._outer[-1:], outer_s

    @property
    def merge_s(self) -> float:
        """The shorter of the last two merges, s; 0 before there are two (`WindowView.merge_s`)."""
        return min(self._took)

    @property
    def measured(self) -> bool:
        """True if `outer_s` is measured, not calculated."""
        return len(self._outer) == 2

    @property
    def outer_s(self) -> float:
        """The shorter of the last two outer steps, s; before there are two, the calculated time (see `WindowView`)."""
        return min(self._outer) if self.measured else self._expected_outer_s
