"""Check that a learner and its run agree on the spec, from joining until the end of training. Runs on asyncio.

A bus that came back empty has lost the spec. The first party to come puts one there: this learner the run's own, or a
newcomer a different one. A syncer that served the run then restores the run's spec; without such a syncer, the first
one stays.
"""

import asyncio

from diloco.pipeline.agreement import differences
from diloco.pipeline.bus.schema import decode_spec
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import SpecMismatch
from diloco.pipeline.liveness import is_live
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload import codec
from diloco.workers.exchange.member import Member
from diloco.workers.times import TIMES


def compare(spec: Spec, held: Spec) -> None:
    """Compare this learner's spec with the run's.

    Raises:
        SpecMismatch: shows what differs.
    """
    if told := differences(spec, held):
        frozen = spec.model_copy(update={"frozen": held.frozen}) == held
        hint = " If frozen tensors differ on purpose, set same_frozen=False in all learners of a new run." * frozen
        raise SpecMismatch(
            f"this learner and the run disagree:\n{told}\n"
            "Give all learners the same model, and the same settings (tokens= too) or none, so that they follow the "
            f"run; or choose a different run name.{hint}",
            tensors=set(spec.tensors) != set(held.tensors),
        )


class Agreement:
    """One learner's spec, compared with the one on the bus."""

    def __init__(self, member: Member) -> None:
        self._bus, self._clock, self._learner = member.bus, member.clock, member.learner
        self._log = member.log
        self._spec, self._encoded = member.spec, codec.encode(member.spec)
        self._other_since_s: float | None = None
        self._asked_since_s: float | None = None

    async def keep_agreed(self) -> None:
        """Check every few seconds, until cancelled.

        Raises:
            SpecMismatch, BusError: see `look`.
        """
        while True:
            await asyncio.sleep(TIMES.look_s)
            await self.look()

    async def look(self, patience_s: float = BUS_TIMES.other_spec_s) -> None:
        """Check that the bus has this spec; put it there if the bus has none.

        Raises:
            SpecMismatch: for `patience_s` there was another spec on the bus; shows what differs.
            BusError: ask again.
        """
        encoded = await self._bus.read_spec() or await self._bus.propose_spec(self._encoded)
        held = self._spec if encoded == self._encoded else decode_spec(self._bus.keys, encoded)
        if held is self._spec or not differences(self._spec, held):
            self._other_since_s = None
            return
        now = self._clock.now()
        if self._other_since_s is None:
            self._other_since_s = now
            detail = (
                "the bus has a different spec under this run's name; unless a syncer restores the right one, "
                "this learner stops"
            )
            self._log.warning("spec_replaced", detail=detail)
        if now - self._other_since_s >= patience_s:
            compare(self._spec, held)

    async def others_trained(self) -> bool:
        """Return whether a live learner has trained values, in whose place fresh ones must not become version 0.

        From the first call on, this is true for `others_trained_s` at most: a learner that has trained restores its
        values by then, and a wrong report must not keep a run from beginning.

        Raises:
            BusError: ask again.
        """
        now = self._clock.now()
        self._asked_since_s = now if self._asked_since_s is None else self._asked_since_s
        return now - self._asked_since_s < TIMES.others_trained_s and any(
            is_live(seen, TIMES.dead_s)
            and seen.report.learner != self._learner
            and max(seen.report.versions, default=-1) >= 0
            for seen in await self._bus.read_reports()
        )
