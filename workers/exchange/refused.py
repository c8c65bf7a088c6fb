"""Follow on the tape what the syncer refuses of this learner; log it, and have a diverged learner healed."""

from collections import Counter
from collections.abc import Mapping

from diloco.pipeline.errors import LearnerDiverged
from diloco.pipeline.messages.fragment import Committed, RefusalReason, Rejected
from diloco.workers.exchange.member import Member

# What to do, by reason. The other reasons concern late deltas and the network, and pass by themselves.
REMEDIES = {
    RefusalReason.NON_FINITE: "the delta has NaN or infinite values, or values too large for float32: lower the "
    "learning rate, and check the loss and the data",
    RefusalReason.ABSURD_NORM: "the delta is far larger than those of other learners: check the learning rate and "
    "the data",
}
# Non-finite deltas of one fragment in a row, after which the learner is told to heal: the same number after which a
# syncer no longer counts their tokens. One or two are mended by the next adoption, if the moments are sound.
HEALED_AFTER = 3


class Refused:
    """The refusals of one incarnation's deltas. Used by the exchange thread only."""

    def __init__(self, member: Member, newest: Mapping[int, tuple[int, int]]) -> None:
        """newest: fragment -> (base version, attempt) of its last delta."""
        self._me, self._log, self._shared = (member.learner, member.incarnation), member.log, member.shared
        self._newest = newest
        self.fragments = set[int]()  # fragments with a refused delta and no merge since
        # Fragment -> non-finite deltas since one of that fragment was merged, or since it was told to heal.
        self._not_finite = Counter[int]()
        # `newest` when the learner was last told to heal, which ranks cannot do; None: not since a delta of `_worst`
        # was merged. Refusals of deltas up to these prove nothing about a healed model.
        self._healed: dict[int, tuple[int, int]] | None = None
        # The fragment because of which it was told to heal. Only its merge proves that the learner is sound again:
        # other fragments may be merged once more with what they trained before all became NaN.
        self._worst = -1

    def refused(self, record: Rejected) -> None:
        """Handle a refusal. This learner's first is logged, and the next one after all refused fragments were merged.

        Raises:
            LearnerDiverged: its deltas are still not finite after it was told to heal.
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
                f"{found}; it was already told to heal, and no delta of fragment {self._worst} has been merged since",
                remedy,
            )
        self._not_finite.clear()
        self._healed, self._worst, self._shared.heal = dict(self._newest), fragment, True
        detail = f"{found}: the learner stops after that many more, unless a delta of that fragment is merged"
        self._log.warning("learner_diverged", detail=detail)

    def merged(self, record: Committed) -> None:
        """Note that deltas were merged, perhaps this learner's."""
        if any((one.learner, one.incarnation) == self._me for one in record.contributions):
            self.fragments.discard(record.fragment)
            self._not_finite.pop(record.fragment, None)
            if record.fragment == self._worst:
                self._healed = None
