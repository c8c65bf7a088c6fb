"""A learner hears from the tape what the syncer refuses of it, and says so in its own log. asyncio."""

from typing import Any

from diloco.pipeline.messages.tape import Committed, RefusalReason, Rejected

REMEDIES = {
    RefusalReason.NON_FINITE: "the model has NaN or infinite values: lower the learning rate, look at the loss and the "
    "data, or start this learner again; what is adopted replaces parameters, but not the optimizer's moments",
    RefusalReason.ABSURD_NORM: "it has moved far more than others' deltas do: look at the learning rate and the data",
}
"""What to do, by reason; other reasons are those of late deltas and of the network, which come again by themselves."""


class Refused:
    """One incarnation's. The exchange thread's."""

    def __init__(self, learner: str, incarnation: str, log: Any) -> None:
        self._me, self._log = (learner, incarnation), log
        self.fragments = set[int]()
        """Of which something was refused, and nothing merged since."""

    def refused(self, record: Rejected) -> None:
        """Somebody's delta was: of this learner's, the first is said, and a later one after all were merged again."""
        remedy = REMEDIES.get(record.reason)
        if remedy is None or (record.learner, record.incarnation) != self._me:
            return
        if not self.fragments:
            told = {"fragment": record.fragment, "reason": record.reason.value, "steps": record.steps}
            self._log.warning("delta_rejected", **told, lost_tokens=record.lost_tokens, detail=remedy)
        self.fragments.add(record.fragment)

    def merged(self, record: Committed) -> None:
        """Deltas were, perhaps this learner's."""
        if any((one.learner, one.incarnation) == self._me for one in record.contributions):
            self.fragments.discard(record.fragment)
