"""A window's contributions, summed as they complete while others are still awaited. asyncio.

So that closing a window costs about one more contribution's worth, not all of them. The sum is of the window's sound
deltas in the order in which they completed, and so is the merge: what was summed before does not show in any bit.
`owner` says which those are; one that has left the window since (its learner has published on a newer base) is in the
sum already, so that is begun anew from the deltas, which are all kept until the commit.
"""

import asyncio
from collections.abc import Sequence

import structlog

from pipeline.fragments import FragmentLayout
from pipeline.spec_messages import SyncSpec

from .fragment import Delta
from .intake import Offload
from .merge import Sum, merge_shares
from .metrics import Metrics
from .room import Room


class Folding:
    """The running sum of one fragment's window."""

    def __init__(self, layout: FragmentLayout, sync: SyncSpec, offload: Offload, metrics: Metrics) -> None:
        self._layout, self._sync, self._offload, self._metrics = layout, sync, offload, metrics
        self._log = structlog.get_logger().bind(fragment=layout.id)
        self._room: Room | None = None
        self._summed: tuple[str, ...] = ()
        """Header entries, in order."""
        self._shares: tuple[float, ...] = ()
        self._wanted: Sequence[Delta] = ()
        self._task: asyncio.Task[None] | None = None

    def fold(self, deltas: Sequence[Delta]) -> None:
        """Have these summed: all sound ones of the window, in order. One alone is left as it is."""
        self._wanted = deltas
        if self._task is not None and self._task.done():
            self._task.result()  # raises what ended it
            self._task = None
        if self._task is None and self._behind():
            self._task = asyncio.create_task(self._sum())

    async def room(self, deltas: Sequence[Delta]) -> Room:
        """Room for the merge of these, with some of them in its sum already; the next sum is another window's."""
        self._wanted = ()
        if self._task is not None:
            await self._task
        if self._room is None or not self._continues(deltas):
            self._begin()
        room = self._room
        assert room is not None  # noqa: S101  # begun
        self.close()
        return room

    def close(self) -> None:
        """Forget all; what is being added in another thread goes nowhere."""
        if self._task is not None:
            self._task.cancel()
        self._room, self._task, self._summed, self._shares, self._wanted = None, None, (), (), ()

    def _behind(self) -> bool:
        """Whether there is something to sum."""
        wanted = tuple(delta.offer.entry_id for delta in self._wanted)
        return len(wanted) > 1 and (wanted != self._summed or not self._continues(self._wanted))

    def _continues(self, deltas: Sequence[Delta]) -> bool:
        """Whether the sum is of the first of these, each multiplied by what it is multiplied by among all of them."""
        count, shares = len(self._summed), self._shares_of(deltas)
        same = self._summed == tuple(delta.offer.entry_id for delta in deltas[:count])
        return same and self._shares == shares[:count]

    def _shares_of(self, deltas: Sequence[Delta]) -> tuple[float, ...]:
        headers = [delta.offer.header for delta in deltas]
        return merge_shares([(h.steps, h.tokens) for h in headers], self._sync.weights)

    def _begin(self) -> None:
        if self._summed:
            self._log.info("sum_begun_anew", summed=len(self._summed))
            self._metrics.sums_begun_anew.inc()
        self._summed = self._shares = ()
        self._room = Room(self._layout.elements, self._sync)
        self._room.sum = Sum(self._layout, self._room.theta)

    async def _sum(self) -> None:
        while self._behind():
            deltas = tuple(self._wanted)
            if self._room is None or not self._continues(deltas):
                self._begin()
            assert self._room is not None and self._room.sum is not None  # noqa: S101, PT018  # begun
            rest, shares = deltas[len(self._summed) :], self._shares_of(deltas)
            new = [delta.values for delta in rest], [delta.norms for delta in rest], shares[len(self._summed) :]
            await self._offload(self._room.sum.add, *new)
            self._summed, self._shares = tuple(delta.offer.entry_id for delta in deltas), shares
