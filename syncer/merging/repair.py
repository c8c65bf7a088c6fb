"""A head and what it names are there, or are put back by the owner that has the values. asyncio.

A payload that has gone (evicted, deleted) or is damaged would stop whoever needs it: learners that lack the version,
joiners, and the syncer that takes over. Without its head (deleted, or the bus came back empty) a fragment stands still.
As long as the owner lives, its memory is the same bits.
"""

import asyncio

import structlog

from diloco.pipeline.bus.commits import STAGED_TTL_S, Commit, Published, Republication
from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.bus.schema import payload_names
from diloco.pipeline.errors import HeadMoved
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.head import Head, WindowView
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.tape import Committed, Rewound
from diloco.pipeline.transfer.global_format import published_by
from diloco.pipeline.transfer.payloads import Offload, push_global
from diloco.syncer.context import RandomHex
from diloco.syncer.membership import RunWatch
from diloco.syncer.merging.fragment import FragmentState

LOOK_S = 10.0
"""Time between two looks at what a head names."""
UNFOLLOWED_S = 60.0
"""A version that live learners wanted for so long, and none of them has, is published whole: updates that are there but
damaged are found by nobody else."""


class Repair:
    """Looks after the payloads of one fragment."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        layout: FragmentLayout,
        sync: SyncSpec,
        nonce: str,
        random_hex: RandomHex,
        offload: Offload,
    ) -> None:
        self._bus, self._clock, self._layout, self._sync = bus, clock, layout, sync
        self._nonce, self._random_hex, self._offload = nonce, random_hex, offload
        self._version, self._since_s = -1, 0.0
        self.due_s = 0.0
        """When to look next."""

    async def look(self, head: Head, fragment: FragmentState, watch: RunWatch) -> Head:
        """See that what a head names is there; returns the head as it is then.

        Args:
            head: as this owner knows it.
            fragment: at the head's version.
            watch: tells whether anybody has adopted it.

        Raises:
            LeaseLost, HeadMoved, PayloadIncomplete, BusError: nothing was changed.
        """
        now = self._clock.now()
        self.due_s = now + LOOK_S
        (there,) = await self._bus.read_heads([self._layout.id])
        if there is None or (there.version, there.digest) != (head.version, head.digest):
            raise HeadMoved(f"the head of fragment {head.fragment} is {'gone' if there is None else 'another one'}")
        head = there
        if self._version != head.version:
            self._version, self._since_s = head.version, now
        why = await self._lacking(head)
        unfollowed = watch.live() and not watch.expected(self._layout.id, head.version)
        if not unfollowed:
            self._since_s = now
        elif head.updates and now - self._since_s > UNFOLLOWED_S:
            why = why or f"no learner could follow it for {UNFOLLOWED_S:g} s"
        if not why:
            return head
        structlog.get_logger().warning("global_published_anew", fragment=head.fragment, version=head.version, why=why)
        return await self._publish(head, fragment)

    async def put_back(self, head: Head, fragment: FragmentState, watch: RunWatch, attempt: int, syncer: str) -> bool:
        """Commit a version once more whose head is gone: the same bits, momentum, merged bases and totals.

        Returns whether the tape says that it was rewound (`say_rewound`): with its head the bus lost what was pending,
        and maybe later versions.

        Args:
            head: the last that its owner knows.
            fragment: at the head's version.
            watch: tells what learners have adopted.
            attempt: of the window to come: a later one than any that learners know.
            syncer: the owner's name, for the tape.

        Raises:
            LeaseLost, HeadMoved (there is one by now), PayloadIncomplete, BusError: nothing was changed.
        """
        p, reason = head.fragment, "put back from its syncer's memory: the bus had lost its head"
        view = WindowView(state="idle", attempt=attempt, members=(), expected=0, reason=reason, deadline_unix_s=None)
        there = not await self._lacking(head)
        published = self._named(head) if there else await self._stage(head, fragment)
        record = Committed.installed(
            p, head.version, head.digest, reason=reason, syncer=syncer, unix_s=self._clock.unix()
        )
        commit = Commit(
            nonce=self._nonce,
            expected=None,
            version=head.version,
            digest=head.digest,
            published=published,
            window=view,
            merged=head.merged,
            record=record,
            interval=head.interval,
            norms=head.norms,
            retired=() if there else tuple(self._due(head)),
            lost=head,
        )
        await self._bus.commit(commit)
        structlog.get_logger().warning("head_put_back", fragment=p, version=head.version, uploaded=not there)
        at = (p, head.version, head.digest)
        return await say_rewound(self._bus, self._clock, self._nonce, at, view, max(head.version, adopted(watch, p)))

    def _named(self, head: Head) -> Published:
        return published_by(head, self._layout.elements, self._sync)

    def _due(self, head: Head) -> dict[str, int]:
        """Chunks of all payloads that a head names."""
        return {one.key: one.chunks for one in self._named(head).payloads}

    async def _lacking(self, head: Head) -> str:
        """What of a head's payloads is not there; "" if nothing."""
        due = self._due(head)
        have = await asyncio.gather(*map(self._bus.count_chunks, due))
        gone = [key for key, count in zip(due, have, strict=True) if count != due[key]]
        return f"of its payloads {', '.join(gone)} is not there" if gone else ""

    async def _stage(self, head: Head, fragment: FragmentState) -> Published:
        """The version whole, under fresh keys."""
        at = self._layout.id, head.version, self._random_hex(8)
        values, momentum = fragment.theta, fragment.momentum
        return await push_global(self._bus, *at, values, self._sync, STAGED_TTL_S, self._offload, momentum)

    async def _publish(self, head: Head, fragment: FragmentState) -> Head:
        whole = await self._stage(head, fragment)
        await self._bus.republish(head.fragment, Republication(self._nonce, (head.version, head.digest), whole))
        return head.model_copy(update=payload_names(whole))


def adopted(watch: RunWatch, fragment: int) -> int:
    """The latest version of a fragment that a live learner has; -1: none has any."""
    return max((s.report.versions[fragment] for s in watch.live() if fragment < len(s.report.versions)), default=-1)


async def say_rewound(
    bus: Bus, clock: Clock, nonce: str, at: tuple[int, int, bytes], view: WindowView, was: int
) -> bool:
    """Tell on the tape, if it is so, that a fragment which got a head again had had one; whether it is so.

    Args:
        bus, clock: the owner's.
        nonce: of its lease.
        at: fragment, version and digest that it has now.
        view: of its window.
        was: the version that it had, as far as known; -1: none.

    Raises:
        BusError: as `Bus.write_window`.
    """
    p, version, digest = at
    if was >= version:
        structlog.get_logger().warning("rewound", fragment=p, version=version, was_version=was)
        record = Rewound(fragment=p, version=version, was_version=was, unix_s=clock.unix())
        await bus.write_window(p, nonce, (version, digest), view, record)
    return was >= version
