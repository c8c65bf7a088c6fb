"""Globals by a cache that learners of a region share, so that one of them at a time pulls over the line. asyncio.

    what is read of the cache    next
    more of the payload          take it, and read on
    nothing, and nobody's claim  claim it; pull the rest from the run's Redis, and keep each piece for the others
    nothing, another's claim     wait for more, for as long as is fair; then pull the rest, for this learner alone

What is fair is known by pulls over the line. Who has made none pulls one chunk once it has waited long enough.

A claim lapses soon, so the next one goes on where a dead one was. The cache is never trusted: the head, which every
learner reads from the run's Redis, has a SHA-256 of each payload. Sizes are the spec's. What has not this sum is
refused, said, and pulled straight. xxh3 digests would be no defence here: a neighbour can make others that fit.

Only a payload's bytes go this way. Nothing here stops a pull: without a cache that works, it is as if there was none.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from diloco.pipeline.bus.ports import Clock
from diloco.pipeline.bus.region import LEASE_S, LEAST_CALL_S, RegionCache
from diloco.pipeline.ema import Ema
from diloco.pipeline.errors import BadPayload, RegionAway
from diloco.pipeline.messages.head import Head
from diloco.pipeline.payload.codec import PayloadReader, as_bytes, payload_bytes
from diloco.pipeline.retry import Backoff
from diloco.pipeline.transfer.payloads import Wanted
from diloco.pipeline.waiting import meanwhile
from diloco.workers.encoding import Offload
from diloco.workers.step_times import DECAY

LEAST_BYTES = 16 * 1024
"""A smaller payload goes straight: calls take longer than its bytes."""
LOOK_S = 0.25
"""Time between two looks whether who brings a payload is still there."""
LEAST_WAIT_S = 2 * LEASE_S
"""For neighbours' pulls at least: with it, and twice a pull of one's own, there is time for a dead one's claim to lapse
and for the next one's pull. All that is waited while no line was measured."""
BACKOFF = Backoff(1.0, 15.0)
"""Waits before a cache that failed is tried again."""

Chunks = Sequence[bytes | memoryview]


class Fair:
    """How long a learner waits for a neighbour's pull: no longer than it would take if both pulled."""

    def __init__(self) -> None:
        self._bytes, self._took_s = Ema(DECAY), Ema(DECAY)

    def observe(self, nbytes: int, took_s: float) -> None:
        """So much came over the line in so long."""
        self._bytes.observe(nbytes)
        self._took_s.observe(took_s)

    @property
    def measured(self) -> bool:
        """Something came over the line."""
        return bool(self._bytes.value)

    def wait_s(self, nbytes: int) -> float:
        """For so many bytes: the two would share the line, so each of them would have half of it."""
        return max(LEAST_WAIT_S, self.call_s(nbytes))

    def call_s(self, nbytes: int) -> float:
        """For a call of the cache that carries so many."""
        if not self._bytes.value:
            return LEAST_WAIT_S
        return max(LEAST_CALL_S, 2 * nbytes * (self._took_s.value or 0.0) / self._bytes.value)


class Region:
    """One learner's way to its globals, where it has a cache: a payload at a time on each lane. The exchange's."""

    def __init__(self, cache: RegionCache, clock: Clock, nonce: str, offload: Offload, log: Any) -> None:
        """nonce: of its claims."""
        self._cache, self._clock, self._nonce, self._offload, self._log = cache, clock, nonce, offload, log
        self._fair, self._waits = Fair(), BACKOFF.waits()
        self._away, self._again_s = False, 0.0
        self.pulled, self.shared = 0, 0
        """Bytes of globals so far: from the run's Redis, from the region's."""

    @property
    def state(self) -> Literal["used", "away"]:
        """As `LearnerReport.region`."""
        return "away" if self._away else "used"

    async def fetch(self, wanted: Wanted, head: Head) -> PayloadReader:
        """As `payloads.Fetch`."""
        due = head.sums.get(wanted.key)
        one, reader, lost = _One(wanted, head, self._clock.now()), wanted.reader(), None
        if due is None or one.size < LEAST_BYTES or self._clock.now() < self._again_s:
            return await self._straight(one, reader)
        try:
            try:
                await self._together(one, reader)
            except RegionAway as error:
                lost = error
            await self._straight(one, reader)  # what it still lacks
            if one.shared and await self._offload(_sum, reader) != due:
                raise BadPayload("its bytes do not have the sum that the head says")
        except BadPayload as error:
            if not one.shared:
                raise
            self._failed("region_entry_refused", f"{wanted.key}: {error}")
            with suppress(RegionAway):
                await self._cache.drop(one.name)
            return await self._straight(one, wanted.reader())
        if lost is None:
            self._worked()
        else:
            self._failed("region_unavailable", str(lost))
        return reader

    async def close(self) -> None:
        """Of its cache too."""
        await self._cache.close()

    async def _together(self, one: "_One", reader: PayloadReader) -> None:
        """Until it is whole, or not to be waited for any longer.

        Raises:
            RegionAway: the cache does not work.
            BadPayload, BusError: as `payloads.pull`; or of what the cache gave.
        """
        while not reader.complete:
            if (left_s := self._left_s(one)) <= 0:
                if self._fair.measured:
                    self._log.debug("region_not_waited_for", fragment=one.head.fragment, chunks=reader.received)
                    return
                await self._pull(one, reader, 1)
            elif not await self._read(one, reader):
                if await self._cache.claim(one.name, self._nonce) == self._nonce:
                    await self._bring(one, reader)
                    return
                await self._read(one, reader, min(LOOK_S, left_s))

    def _left_s(self, one: "_One") -> float:
        """Time for what others bring of a payload, whoever they are and however many."""
        return one.began_s + self._fair.wait_s(one.size) - self._clock.now()

    async def _read(self, one: "_One", reader: PayloadReader, block_s: float = 0.0) -> bool:
        """Take what the cache has next, if it has anything."""
        limit, chunk_bytes = min(one.wanted.limit, reader.expected - reader.received), one.wanted.chunk_bytes
        within_s = self._fair.call_s(limit * chunk_bytes)
        chunks = await self._cache.read(one.name, reader.received, limit, chunk_bytes, within_s, block_s)
        one.shared |= bool(chunks)
        for chunk in chunks:
            reader.feed(chunk)
            self.shared += len(chunk)
        return bool(chunks)

    async def _bring(self, one: "_One", reader: PayloadReader) -> None:
        """Pull what is lacking, for all."""
        while not reader.complete and self._left_s(one) > 0 and await self._read(one, reader):
            pass  # who had the claim before has brought it by now, or some of it
        if reader.complete:
            return
        lost: RegionAway | None = None
        async with meanwhile(self._keep_claim(one.name)):
            while not reader.complete:
                first, chunks = reader.received, await self._pull(one, reader)
                if lost is None:
                    try:
                        within_s = self._fair.call_s(sum(map(len, chunks)))
                        await self._cache.write(one.name, first, chunks, within_s)
                    except RegionAway as error:
                        lost = error
        if lost is not None:
            raise lost
        await self._cache.keep(one.head.fragment, one.version, one.name, one.oldest)

    async def _keep_claim(self, name: str) -> None:
        """Until cancelled. One that was lost is another's: then two pull, and both get it."""
        with suppress(RegionAway):
            while True:
                await asyncio.sleep(LEASE_S / 3)
                await self._cache.claim(name, self._nonce)

    async def _straight(self, one: "_One", reader: PayloadReader) -> PayloadReader:
        """What a reader lacks, from the run's Redis."""
        while not reader.complete:
            await self._pull(one, reader)
        return reader

    async def _pull(self, one: "_One", reader: PayloadReader, most: int | None = None) -> Chunks:
        """most: chunks; None: as many as are in flight at a time."""
        began = self._clock.now()
        try:
            chunks = await one.wanted.chunks(reader.received, most)
        except BadPayload:  # the run's Redis does not have it any more: nothing of the region's is wrong
            one.shared = False
            raise
        size = sum(map(len, chunks))
        self.pulled += size
        self._fair.observe(size, self._clock.now() - began)
        for chunk in chunks:
            reader.feed(chunk)
        return chunks

    def _failed(self, event: str, detail: str) -> None:
        """Go straight for a while. It is said once until it works again."""
        self._again_s = self._clock.now() + next(self._waits)
        if not self._away:
            what = "globals are pulled from the run's Redis until it can be used again"
            self._log.warning(event, detail=f"{detail}; {what}")
        self._away = True

    def _worked(self) -> None:
        if self._away:
            self._log.info("region_found")
            self._away, self._waits = False, BACKOFF.waits()


@dataclass(slots=True)
class _One:
    """A payload that is pulled, by the cache if it has a sum."""

    wanted: Wanted
    head: Head
    began_s: float
    """When it was first asked for."""
    shared: bool = False
    """Some of it came from the cache, and may be why it is wrong."""

    @property
    def size(self) -> int:
        """Bytes."""
        return payload_bytes(self.wanted.elements, self.wanted.codec)

    @property
    def name(self) -> str:
        """In the cache: its sum."""
        return self.head.sums[self.wanted.key].hex()

    @property
    def version(self) -> int:
        """Of what it leads to."""
        behind = [update.payload for update in reversed(self.head.updates)]
        return self.head.version - (behind.index(self.wanted.key) if self.wanted.key in behind else self.head.behind)

    @property
    def oldest(self) -> int:
        """Version of the oldest payload that the head names."""
        return self.head.version - max(self.head.behind, len(self.head.updates) - 1, 0)


def _sum(reader: PayloadReader) -> bytes:
    return hashlib.sha256(as_bytes(reader.vector())).digest()
