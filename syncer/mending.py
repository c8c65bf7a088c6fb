"""What a head names is there, or is published anew by the owner that has the values. asyncio.

A payload that has gone (evicted, deleted) or is damaged would stop whoever needs it: learners that lack the version,
joiners, and the syncer that takes over. As long as the owner lives, its memory is the same bits.
"""

import asyncio

import structlog

from pipeline.codec import chunk_count
from pipeline.fragments import FragmentLayout
from pipeline.globals import push_global
from pipeline.messages import Head, SyncSpec
from pipeline.payloads import push
from pipeline.ports import Bus, Clock, Republication
from pipeline.stored import names

from .fragment import FragmentState
from .staging import REPLACED_TTL_S, STAGED_TTL_S, RandomHex
from .watch import RunWatch

LOOK_S = 10.0
"""Time between two looks at what a head names."""
UNFOLLOWED_S = 60.0
"""A version that live learners wanted for so long, and none of them has, is published whole: updates that are there but
damaged are found by nobody else."""


class Mending:
    """Looks after the payloads of one fragment."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        layout: FragmentLayout,
        sync: SyncSpec,
        nonce: str,
        random_hex: RandomHex,
    ) -> None:
        self._bus, self._clock, self._layout, self._sync = bus, clock, layout, sync
        self._nonce, self._random_hex = nonce, random_hex
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

    async def _lacking(self, head: Head) -> str:
        """What of a head's payloads is not there; "" if nothing."""
        due = {head.payload: head.chunks}
        due |= {key: one.chunks for one in head.updates for key in one.payloads}
        due |= {head.rest: head.chunks} if head.rest else {}
        if head.momentum:
            due[head.momentum] = chunk_count(self._layout.elements, "fp32", self._sync.chunk_bytes)
        have = await asyncio.gather(*map(self._bus.count_chunks, due))
        gone = [key for key, count in zip(due, have, strict=True) if count != due[key]]
        return f"of its payloads {', '.join(gone)} is not there" if gone else ""

    async def _publish(self, head: Head, fragment: FragmentState) -> Head:
        p, bus, sync, fresh = self._layout.id, self._bus, self._sync, self._random_hex(8)
        payload, rest = await push_global(bus, p, head.version, fresh, fragment.theta, sync, STAGED_TTL_S)
        momentum = None
        if fragment.momentum is not None:
            key = bus.keys.momentum_payload(p, head.version, fresh)
            momentum = await push(bus, key, fragment.momentum, sync.chunk_bytes, STAGED_TTL_S)
        at = (head.version, head.digest)
        anew = Republication(self._nonce, at, payload, rest, momentum, REPLACED_TTL_S)
        await bus.republish(p, anew)
        return head.model_copy(update=names(anew))
