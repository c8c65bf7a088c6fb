"""A region's cache in memory: the same steps and stored bytes as on Redis, in the event loop's (virtual) time."""

import asyncio
from collections.abc import Sequence

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import Clock
from diloco.pipeline.bus.region import ENTRY_S, FADING_S, LEASE_S, RegionCache
from diloco.pipeline.errors import BusError, RegionAway
from diloco.pipeline.testing.memory_calls import MemoryCalls
from diloco.pipeline.testing.memory_store import MemoryStore


class MemoryRegionCache(MemoryCalls, RegionCache):
    """On a `MemoryStore`, which stands for the region's Redis; several may share it."""

    def __init__(self, run: str, clock: Clock, store: MemoryStore | None = None) -> None:
        super().__init__(run, clock, store)
        self.keys = RunKeys(run)
        self.away = ""
        """Why it cannot be reached; "": it can."""

    async def read(
        self, name: str, first: int, limit: int, chunk_bytes: int, within_s: float, block_s: float = 0.0
    ) -> Sequence[bytes | memoryview]:
        await self._reached()
        try:
            found = await self._read({self.keys.region_payload(name): f"{first}-0"}, limit, block_s)
        except BusError as error:
            raise RegionAway(str(error)) from error
        return [data for _, entries in found for _, data in entries]

    async def claim(self, name: str, nonce: str) -> str:
        await self._reached()
        key = self.keys.region_claim(name)
        await self._claim(key, nonce, LEASE_S)
        return (self._bytes(key) or b"").decode()

    async def write(self, name: str, first: int, chunks: Sequence[bytes | memoryview], within_s: float) -> None:
        await self._reached()
        key = self.keys.region_payload(name)
        for index, chunk in enumerate(chunks, first):
            have = self._stream(key).last[0]
            if have > index or (index and not have):
                continue
            try:
                self.store.need_room()
            except BusError as error:
                self.store.delete(key)
                raise RegionAway(str(error)) from error
            self._xadd(key, bytes(chunk), (index + 1, 0))
        self._expire(key, ENTRY_S)

    async def keep(self, fragment: int, version: int, name: str, oldest: int) -> None:
        await self._reached()
        key = self.keys.region_kept(fragment)
        self.store.hset(key, {name: b"%d" % version, **{k.decode(): v for k, v in self._hash(key).items()}})
        self._expire(key, ENTRY_S)
        for one, at in list(self._hash(key).items()):
            if int(at) < oldest:
                self._expire(self.keys.region_payload(one.decode()), FADING_S)
                del self._hash(key)[one]

    async def drop(self, name: str) -> None:
        await self._reached()
        self.store.delete(self.keys.region_payload(name))

    async def _reached(self) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise RegionAway(self.away)
