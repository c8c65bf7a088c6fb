"""Refusals of deltas of one fragment (asyncio): off the stream, and on to the tape, the log and the metrics."""

from collections import Counter

import structlog

from diloco.pipeline.bus.commits import MAX_HEADERS, Refusal
from diloco.pipeline.bus.ports import Clock, OwnerWrites
from diloco.pipeline.messages.fragment import DeltaHeader, RefusalReason, Rejected
from diloco.syncer.admission import Refused
from diloco.syncer.metrics import Metrics

# Refusals of one learner that the tape and the log record while a window lasts. Further ones are only counted, because
# a learner that floods its stream must not fill the tape, which all others read.
TOLD_A_WINDOW = 32


class Refusals:
    """Refuses deltas of one fragment; the bus checks the lease's nonce and the head in the same atomic step."""

    def __init__(self, bus: OwnerWrites, clock: Clock, metrics: Metrics, fragment: int, nonce: str) -> None:
        self._bus, self._clock, self._metrics = bus, clock, metrics
        self._p, self._nonce = fragment, nonce
        self._log = structlog.get_logger().bind(fragment=fragment)
        self._told: Counter[str] = Counter()
        self._at: tuple[int, bytes] | None = None
        """(version, digest) of the head to whose window `_told` belongs."""

    async def refuse(
        self,
        at: tuple[int, bytes],
        entry_id: str,
        header: DeltaHeader | None,
        refused: Refused,
        payloads: tuple[str, ...] = (),
        tell: bool = True,
    ) -> None:
        """Refuse one entry of the stream for good.

        Args:
            at: (version, digest) of the head by which it was judged.
            header: None if its bytes could not be decoded.
            payloads: keys of the payloads that are deleted with it.
            tell: False if nothing is lost by the refusal; it is counted, but not recorded on tape and log.

        Raises:
            BusError: see `Bus.refuse`.
        """
        learner = header.learner if header else ""
        records = self._record_refusal(at, learner, header, refused, tell)
        untold = () if records else (refused.reason,)
        refusal = Refusal(self._nonce, at, (entry_id,), payloads, records, refused.lost_tokens, untold)
        await self._bus.refuse(self._p, refusal)

    async def cut(self, at: tuple[int, bytes], learner: str) -> None:
        """Refuse all but the last headers of a learner that floods its stream, unread and atomically.

        Raises:
            BusError: see `Bus.refuse`.
        """
        detail = f"more than {MAX_HEADERS} headers were waiting: all but the newest are refused unread"
        refused = Refused(RefusalReason.FLOOD, detail, 0)
        told = self._record_refusal(at, learner, None, refused, tell=True)
        records = tuple(one.model_copy(update={"last_told": True}) for one in told)
        untold = () if records else (RefusalReason.FLOOD,)
        await self._bus.refuse(self._p, Refusal(self._nonce, at, (), (), records, untold=untold, cut=learner))

    def _record_refusal(
        self, at: tuple[int, bytes], learner: str, header: DeltaHeader | None, refused: Refused, tell: bool
    ) -> tuple[Rejected, ...]:
        """Count a refusal; log it and return its record for the tape, unless `tell` is False or enough were told."""
        reason, detail, lost_tokens = refused.reason, refused.detail, refused.lost_tokens
        self._metrics.refusals.labels(reason=reason.value).inc()
        if at != self._at:  # another window: the count begins again
            self._told, self._at = Counter(), at
        self._told[learner] += tell
        if tell and (told := self._told[learner]) <= TOLD_A_WINDOW:
            self._log.warning("delta_rejected", learner=learner, reason=reason.value, detail=detail)
            unix_s, where = self._clock.unix(), (self._p, at[0])
            record = Rejected.of(header, where, lost_tokens=lost_tokens, reason=reason, detail=detail, unix_s=unix_s)
            return (record.model_copy(update={"learner": learner, "last_told": told == TOLD_A_WINDOW}),)
        if tell and told == TOLD_A_WINDOW + 1:
            self._log.warning("refusals_untold", learner=learner, after=TOLD_A_WINDOW, until="the next window")
        return ()
