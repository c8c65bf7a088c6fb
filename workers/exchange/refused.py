"""A learner hears from the tape what the syncer refuses of it, says so in its own log, and is to be mended. asyncio."""

from collections import Counter
from collections.abc import Mapping

from diloco.pipeline.errors import LearnerDiverged
from diloco.pipeline.messages.tape import Committed, RefusalReason, Rejected
from diloco.workers.exchange.member import Member

REMEDIES = {
    RefusalReason.NON_FINITE: "the model has NaN or infinite values: lower the learning rate, look at the loss and the "
    "data",
    RefusalReason.ABSURD_NORM: "it has moved far more than others' deltas do: look at the learning rate and the data",
}
"""What to do, by reason; other reasons are those of late deltas and of the network, which come again by themselves."""
HEALED_AFTER = 3
"""Deltas of one fragment in a row that are not finite: as many as a syncer takes until their tokens count no more. One
or two are mended by what is adopted, where moments are sound."""


class Refused:
    """One incarnation's. The exchange thread's."""

    def __init__(self, member: Member, newest: Mapping[int, tuple[int, int]]) -> None:
        """newest: fragment -> (base version, attempt) of its last delta."""
        self._me, self._log, self._shared = (member.learner, member.incarnation), member.log, member.shared
        self._newest = newest
        self.fragments = set[int]()
        """Of which something was refused, and nothing merged since."""
        self._not_finite = Counter[int]()
        """Of each fragment, since one of its own was merged, or since it was healed."""
        self._healed: dict[int, tuple[int, int]] | None = None
        """`newest` when it was told to heal, which not all can; None: not since a delta of `_worst` was merged."""
        self._worst = -1
        """The fragment that had it heal. Others may be merged once more, with what they trained until all is NaN."""

    def refused(self, record: Rejected) -> None:
        """Somebody's delta was: of this learner's, the first is said, and a later one after all were merged again.

        Raises:
            LearnerDiverged: what it trains is not finite, also after it was told to heal.
        """
        remedy = REMEDIES.get(record.reason)
        if remedy is None or (record.learner, record.incarnation) != self._me:
            return
        if not self.fragments:
            told = {"fragment": record.fragment, "reason": record.reason.value, "steps": record.steps}
            self._log.warning("delta_rejected", **told, lost_tokens=record.lost_tokens, detail=remedy)
        self.fragments.add(record.fragment)
        before = (self._healed or {}).get(record.fragment, (-1, -1))
        if record.reason is RefusalReason.NON_FINITE and (record.base_version, record.attempt) > before:
            self._not_finite[record.fragment] += 1
            if self._not_finite[record.fragment] == HEALED_AFTER:
                self._heal(record.fragment, remedy)

    def _heal(self, fragment: int, remedy: str) -> None:
        found = f"{HEALED_AFTER} deltas of fragment {fragment} in a row are not finite"
        if self._healed is not None:
            raise LearnerDiverged(
                f"{found}; it was told to heal, and none of fragment {self._worst} was merged", remedy
            )
        self._not_finite.clear()
        self._healed, self._worst, self._shared.heal = dict(self._newest), fragment, True
        detail = f"{found}: it ends after as many more, unless one of it is merged"
        self._log.warning("learner_diverged", detail=detail)

    def merged(self, record: Committed) -> None:
        """Deltas were, perhaps this learner's."""
        if any((one.learner, one.incarnation) == self._me for one in record.contributions):
            self.fragments.discard(record.fragment)
            self._not_finite.pop(record.fragment, None)
            if record.fragment == self._worst:
                self._healed = None
