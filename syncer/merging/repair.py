"""Repair of a fragment on the bus (asyncio): the owner puts back a lost head, or lost payloads, from its memory.

A payload that is gone (evicted, deleted) or damaged would stop all that need it: learners that lack the version,
learners that join, and the syncer that takes over. Without its head (deleted, or lost because the bus came back empty)
a fragment makes no progress at all. As long as its owner lives, the same bits are in the owner's memory.
"""

import asyncio

import structlog

from diloco.pipeline.bus.commits import Commit, Published, Republication
from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.bus.schema import payload_names
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import HeadMoved
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.head import Head, WindowView
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.tape import Committed, Rewound
from diloco.pipeline.transfer.globals import published_by, push_global
from diloco.pipeline.transfer.payloads import Offload
from diloco.syncer.context import RandomHex
from diloco.syncer.membership import RunWatch
from diloco.syncer.merging.fragment import FragmentState
from diloco.syncer.times import TIMES


class Repair:
    """Checks the head and the payloads of one fragment, and puts back what is lost."""

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
        self.due_s = 0.0
        """When the next check is due."""

    async def check(self, head: Head, fragment: FragmentState) -> Head:
        """Check that the payloads that a head names are there, and publish them again if not; return the current head.

        Args:
            head: as this owner knows it.
            fragment: at the head's version.

        Raises:
            HeadMoved: the head on the bus is gone or is another one; nothing was changed.
            LeaseLost, PayloadIncomplete, BusError: nothing was changed.
        """
        self.due_s = self._clock.now() + TIMES.repair_s
        (there,) = await self._bus.read_heads([self._layout.id])
        if there is None or (there.version, there.digest) != (head.version, head.digest):
            raise HeadMoved(f"the head of fragment {head.fragment} is {'gone' if there is None else 'a different one'}")
        head = there
        if not (why := await self._lacking(head)):
            return head
        structlog.get_logger().warning("global_republished", fragment=head.fragment, version=head.version, why=why)
        return await self._publish(head, fragment)

    async def put_back(self, head: Head, fragment: FragmentState, watch: RunWatch, attempt: int, syncer: str) -> bool:
        """Commit a version again whose head is gone, with the same bits, momentum, merged bases and totals.

        With the head the bus lost the pending deltas, and maybe later versions.

        Args:
            head: the last one that its owner knows.
            fragment: at the head's version.
            watch: tells which versions learners have adopted.
            attempt: of the window to come; must be later than any that learners know.
            syncer: the owner's name, for the tape.

        Returns:
            True if the tape records that the fragment was rewound (`say_rewound`).

        Raises:
            HeadMoved: there is a head by now; nothing was changed.
            LeaseLost, PayloadIncomplete, BusError: nothing was changed.
        """
        p, reason = head.fragment, "restored from its syncer's memory, because the bus had lost its head"
        view = WindowView(state="idle", attempt=attempt, members=(), expected=0, reason=reason, deadline_unix_s=None)
        there = not await self._lacking(head)
        published = self._named(head) if there else await self._stage(head, fragment)
        record = Committed(
            fragment=p,
            version=head.version,
            digest=head.digest,
            reason=reason,
            syncer=syncer,
            unix_s=self._clock.unix(),
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
        """Return the number of chunks of each payload that a head names, by key."""
        return {one.key: one.chunks for one in self._named(head).payloads}

    async def _lacking(self, head: Head) -> str:
        """Return a text that names a head's payloads that are gone or incomplete; "" if there are none."""
        due = self._due(head)
        have = await asyncio.gather(*map(self._bus.count_chunks, due))
        gone = [key for key, count in zip(due, have, strict=True) if count != due[key]]
        return f"its payloads {', '.join(gone)} are missing" if gone else ""

    async def _stage(self, head: Head, fragment: FragmentState) -> Published:
        """Upload the whole version under fresh keys."""
        at = self._layout.id, head.version, self._random_hex(8)
        values, momentum = fragment.theta, fragment.momentum
        return await push_global(self._bus, *at, values, self._sync, BUS_TIMES.staged_ttl_s, self._offload, momentum)

    async def _publish(self, head: Head, fragment: FragmentState) -> Head:
        whole = await self._stage(head, fragment)
        await self._bus.republish(head.fragment, Republication(self._nonce, (head.version, head.digest), whole))
        return head.model_copy(update=payload_names(whole))


def adopted(watch: RunWatch, fragment: int) -> int:
    """Return the latest version of a fragment that a live learner has; -1 if none has any."""
    return max((s.report.versions[fragment] for s in watch.live() if fragment < len(s.report.versions)), default=-1)


async def say_rewound(
    bus: Bus, clock: Clock, nonce: str, at: tuple[int, int, bytes], view: WindowView, was: int
) -> bool:
    """Record on the tape that a fragment was rewound, if it had at least its current version before.

    Args:
        bus, clock: the owner's.
        nonce: of the owner's lease.
        at: fragment, version and digest of the current head.
        view: the state of the fragment's window.
        was: the version that the fragment had before, as far as known; -1 if none is known.

    Returns:
        True if it was rewound.

    Raises:
        BusError: see `Bus.write_window`.
    """
    p, version, digest = at
    if was >= version:
        structlog.get_logger().warning("rewound", fragment=p, version=version, was_version=was)
        record = Rewound(fragment=p, version=version, was_version=was, unix_s=clock.unix())
        await bus.write_window(p, nonce, (version, digest), view, record)
    return was >= version
