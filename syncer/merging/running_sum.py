"""A window's contributions, summed as they complete while others are still awaited. asyncio.

So that closing a window costs about one more contribution's worth, not all of them. The sum is of the window's sound
deltas in the order in which they completed, and so is the merge: what was summed before does not show in any bit.
`session` says which those are; one that has left the window since (its learner has published on a newer base) is in the
sum already, so that is begun anew from the deltas, which are all kept until the commit.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.transfer.payloads import Offload
from diloco.syncer.merging.draft import Draft
from diloco.syncer.merging.fragment import Delta
from diloco.syncer.merging.merge import merge_shares
from diloco.syncer.metrics import Metrics


@dataclass(slots=True)
class _Begun:
    """A draft with some contributions in its sum."""

    draft: Draft
    entries: tuple[str, ...] = ()
    """Their header entries, in order."""
    shares: tuple[float, ...] = ()
    """What each was multiplied by."""


class RunningSum:
    """The running sum of one fragment's window."""

    def __init__(
        self, fragment: int, sync: SyncSpec, new_draft: Callable[[], Draft], offload: Offload, metrics: Metrics
    ) -> None:
        """new_draft: makes memory for a merge (`Staging.draft`)."""
        self._sync, self._new_draft, self._offload, self._metrics = sync, new_draft, offload, metrics
        self._log = structlog.get_logger().bind(fragment=fragment)
        self._begun: _Begun | None = None
        self._wanted: Sequence[Delta] = ()
        self._task: asyncio.Task[None] | None = None

    def follow(self, deltas: Sequence[Delta]) -> None:
        """Have these summed: all sound ones of the window, in order. One alone is left as it is."""
        self._wanted = deltas
        if self._task is not None and self._task.done():
            self._task.result()  # raises what ended it
            self._task = None
        if self._task is None and self._behind():
            self._task = asyncio.create_task(self._add_wanted())

    async def draft(self, deltas: Sequence[Delta]) -> Draft:
        """A draft for the merge of these, with some of them in its sum already; the next sum is another window's."""
        self._wanted = ()
        if self._task is not None:
            await self._task
        draft = self._fitting(deltas).draft
        self.close()
        return draft

    def close(self) -> None:
        """Forget all; what is being added in another thread goes nowhere."""
        if self._task is not None:
            self._task.cancel()
        self._begun, self._task, self._wanted = None, None, ()

    def _behind(self) -> bool:
        """Whether there is something to sum."""
        wanted, begun = tuple(delta.offer.entry_id for delta in self._wanted), self._begun
        if len(wanted) < 2:
            return False
        return begun is None or wanted != begun.entries or not self._continues(begun, self._wanted)

    def _fitting(self, deltas: Sequence[Delta]) -> _Begun:
        """What was begun, if these continue it; else a new one."""
        begun = self._begun
        if begun is not None and self._continues(begun, deltas):
            return begun
        if begun is not None and begun.entries:
            self._log.info("sum_begun_anew", summed=len(begun.entries))
            self._metrics.sums_begun_anew.inc()
        self._begun = begun = _Begun(self._new_draft())
        return begun

    def _continues(self, begun: _Begun, deltas: Sequence[Delta]) -> bool:
        """Whether the sum is of the first of these, each multiplied by what it is multiplied by among all of them."""
        count, shares = len(begun.entries), self._shares_of(deltas)
        same = begun.entries == tuple(delta.offer.entry_id for delta in deltas[:count])
        return same and begun.shares == shares[:count]

    def _shares_of(self, deltas: Sequence[Delta]) -> tuple[float, ...]:
        headers = [delta.offer.header for delta in deltas]
        return merge_shares([(h.steps, h.tokens) for h in headers], self._sync.weights)

    async def _add_wanted(self) -> None:
        while self._behind():
            deltas = tuple(self._wanted)
            begun, shares = self._fitting(deltas), self._shares_of(deltas)
            done = len(begun.entries)
            rest = deltas[done:]
            new = [delta.values for delta in rest], [delta.norms for delta in rest], shares[done:]
            await self._offload(begun.draft.sum.add, *new)
            begun.entries, begun.shares = tuple(delta.offer.entry_id for delta in deltas), shares
