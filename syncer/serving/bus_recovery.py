"""Recovery of a run's spec, state and reports after the bus has lost them. Runs on asyncio.

Heads are recovered by their owners (`installing`). A bus that came back empty is recognised by its missing state.
"""

from collections.abc import Sequence
from contextlib import suppress

import structlog

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.bus.stored_reports import REPORTS_LEFT
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BusFull, SpecMismatch
from diloco.pipeline.messages.run import RunState, SeenReport
from diloco.syncer.context import AgreedSpec
from diloco.syncer.owner import FragmentOwner


class BusRestorer:
    """Puts back, from one syncer's memory, what the bus has lost of the whole run."""

    def __init__(self, bus: Bus, clock: Clock, agreed: AgreedSpec, owners: Sequence[FragmentOwner]) -> None:
        self._bus, self._clock, self._agreed, self._owners = bus, clock, agreed, owners
        self._other_since_s: float | None = None
        self._reports: dict[tuple[str, str], tuple[SeenReport, float]] = {}
        """(learner, incarnation) -> its last report, and when it was seen."""
        self._put_back: set[tuple[str, str]] = set()
        """Reports that were put back and have not been seen on the bus since."""
        self._emptied = False
        self._log = structlog.get_logger()

    async def reports(self, found: Sequence[SeenReport]) -> Sequence[SeenReport]:
        """Put back reports that are gone, since the ledger and the count of tokens need them; return all reports.

        A report that its learner has written again meanwhile is newer and is not replaced.

        Raises:
            BusError: the bus failed; call it again.
        """
        now = self._clock.now()
        there = {(seen.report.learner, seen.report.incarnation): (seen, now) for seen in found}
        gone = {
            name: seen.model_copy(update={"age_s": seen.age_s + now - seen_s})
            for name, (seen, seen_s) in self._reports.items()
            if name not in there
        }
        if len(there) >= REPORTS_LEFT:  # beyond this many the bus itself drops reports, so they are not lost
            self._reports, gone = {}, {}
        self._reports |= there
        self._put_back -= there.keys()
        if (lost := gone.keys() - self._put_back) and not await self._agreed.another():
            with suppress(BusFull):  # the run must continue meanwhile; the next call tries again
                for name in sorted(lost):
                    await self._bus.put_back_report(gone[name])
                self._put_back |= lost
                self._log.warning("reports_put_back", learners=sorted({learner for learner, _ in lost}))
        return [*found, *gone.values()]

    async def state(self, found: RunState | None, known: RunState | None) -> RunState | None:
        """Return the run's state; put back the last known one if the bus has lost it.

        In that case the bus may have lost everything, so the owners check their heads, and the spec is put back. If the
        bus has only lost that the run should end, the later phase is written again, because learners may have left on
        account of it. It is not written if the run was extended or started from scratch while this syncer saw nothing.

        Raises:
            BusError, SpecMismatch: see `spec`.
            RunReplaced: another run has begun under this name.
        """
        if found is not None:
            self._emptied = False
            if known is not None and known.has_merged:  # before the first merge nothing can be lost
                found.check_same_run(known, self._bus.keys.run, "This syncer has served")
            if known is not None and known.phase.rank > found.phase.rank and known.same_part(found):
                found = await self._bus.write_state(known)
                self._log.warning("state_put_back", phase=found.phase.value, reason=found.reason)
        elif known is not None:
            if not self._emptied:
                self._emptied = True
                self._log.warning("state_lost", detail="the bus has lost the run's state; restoring it from memory")
                for owner in self._owners:
                    owner.check_soon()
                await self.spec()
            # Not only by the lead, which may not have read the state in time, and would begin another run.
            found = await self._bus.write_state(known)
        return found

    async def spec(self) -> None:
        """Check that the bus has this run's spec; put it back if it is gone or was replaced by another one.

        Raises:
            SpecMismatch: another run has begun under this name.
            BusError: the bus failed; call it again.
        """
        found = await self._bus.read_spec()
        told = self._agreed.differs(found)
        if found is None:
            await self._bus.propose_spec(self._agreed.encoded)
            self._log.warning("spec_put_back")
        if found is None or not told:
            self._other_since_s = None
            return
        now = self._clock.now()
        if self._other_since_s is None:
            self._other_since_s = now
        if await self._ours() and await self._bus.replace_spec(self._agreed.encoded, found):
            self._log.warning("spec_put_back", instead_of=told)
            self._other_since_s = None
        elif now - self._other_since_s >= BUS_TIMES.other_spec_s:
            raise SpecMismatch(
                f"another run was started under the name {self._bus.keys.run!r}, with a different spec:\n"
                f"{told}\n"
                "Restart this syncer to serve that run, or choose a different run name."
            )

    async def _ours(self) -> bool:
        """Return whether a head on the bus is in an owner's memory; if the bus has none, whether any head is."""
        heads = await self._bus.read_heads(range(len(self._owners)))
        if any(heads):
            return any(head and owner.knows(head) for owner, head in zip(self._owners, heads, strict=True))
        return any(owner.knows(None) for owner in self._owners)
