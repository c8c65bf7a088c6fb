"""How long a learner's pulls take: the delivery in the grace's sync time (paper, adaptive grace window). Pure.

A pull is counted from the learner's first sight of the head to the global in its hands, all by its own clock. The news
of the commit is under way for about as long as the commit's answer is, which the syncer has counted by then. So the
two together are the time from the fixed set to the pulled global, and no two machines' clocks are compared.
"""

SMOOTHING = 0.9
"""Share of the old estimate that each pull leaves, as of a learner's step times."""


class PullTimes:
    """Of one incarnation, s."""

    def __init__(self, mean_elements: float) -> None:
        """mean_elements: of the layout's fragments, above 0."""
        self._mean = mean_elements
        self._elements = self._took_s = 0.0

    def took(self, elements: int, seconds: float) -> None:
        """One more pull, of a fragment of so many elements."""
        kept = SMOOTHING if self._elements else 0.0
        self._elements = kept * self._elements + (1 - kept) * elements
        self._took_s = kept * self._took_s + (1 - kept) * seconds

    @property
    def pull_s(self) -> float:
        """For a fragment of mean size; 0.0 before the first pull. A large fragment counts by its size."""
        return self._took_s * self._mean / self._elements if self._elements else 0.0
