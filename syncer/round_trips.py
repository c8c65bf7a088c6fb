"""How many steps the round trips of one fragment take. Pure.

A learner goes on training on its base until what it published is merged and here, and adopts that after a step. All of
these steps are overwritten. `ramps.stretched` makes intervals longer by them.
"""

from collections.abc import Sequence
from statistics import median


class RoundTrips:
    """The last two of one fragment."""

    def __init__(self) -> None:
        self._took = (0.0, 0.0)

    def took(self, seconds: float) -> None:
        """One more: quorum time, grace and synchronisation time of one window."""
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
