"""Which learners are not waited for, because of what they sent. Pure.

A learner whose deltas of a fragment were refused several times in a row for what was in them, or did not come, costs
the others time with each new one: the quorum counts its header, and falls short again. So from then on it counts
only once its delta is here and sound, and nobody waits for it. One sound delta ends the doubt. It is no punishment:
whoever forges another learner's name only makes the others not wait for that one.
"""

from diloco.pipeline.messages.tape import RefusalReason
from diloco.pipeline.messages.wire import MAX_LEARNERS

DOUBTED_AFTER = 3
"""Refusals in a row."""
BAD = frozenset(
    {
        RefusalReason.WRONG_LAYOUT,
        RefusalReason.NON_FINITE,
        RefusalReason.ABSURD_NORM,
        RefusalReason.NOT_POSITIVE,
        RefusalReason.BAD_PAYLOAD,
        RefusalReason.UPLOAD_TIMEOUT,
        RefusalReason.FLOOD,
    }
)
"""Reasons that no fault between a learner and its syncer explains, three times in a row."""


class Doubts:
    """Of one fragment; at most as many learners as a run may have are remembered, the longest silent one goes."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def refused(self, learner: str, reason: RefusalReason) -> None:
        """A delta of this learner was refused."""
        if reason in BAD:
            self._in_a_row[learner] = self._in_a_row.pop(learner, 0) + 1
            if len(self._in_a_row) > MAX_LEARNERS:
                del self._in_a_row[next(iter(self._in_a_row))]

    def sound(self, learner: str) -> None:
        """A delta of it is here, and can be merged."""
        self._in_a_row.pop(learner, None)

    @property
    def learners(self) -> frozenset[str]:
        """Those that nobody waits for."""
        return frozenset(learner for learner, times in self._in_a_row.items() if times >= DOUBTED_AFTER)
