"""Who owns which fragment, and which syncers are here, on Redis."""

from collections.abc import Sequence

from diloco.pipeline.bus import stored_values
from diloco.pipeline.bus.ports import FragmentLeases, SyncerBoard
from diloco.pipeline.bus.redis.calls import to_ms
from diloco.pipeline.bus.redis.connection import RedisConnection, pairs


class RedisFragmentLeases(RedisConnection, FragmentLeases):
    """A lease is a string that expires: the owner's nonce."""

    async def acquire_lease(self, fragment: int, nonce: str, ttl_s: float) -> bool:
        return await self._claim(self.keys.lease(fragment), nonce, ttl_s)

    async def release_lease(self, fragment: int, nonce: str) -> None:
        await self._redis.script("release", [self.keys.lease(fragment)], nonce)

    async def read_leases(self, fragments: Sequence[int]) -> list[str | None]:
        found = await self._redis.many(("GET", self.keys.lease(p)) for p in fragments)
        return [None if holder is None else holder.decode(errors="replace") for holder in found]


class RedisSyncerBoard(RedisConnection, SyncerBoard):
    """A hash of nonces, with name and end."""

    async def announce_syncer(self, nonce: str, name: str, ttl_s: float) -> tuple[str, ...]:
        (live,) = await self._redis.script("announce_syncer", [self.keys.syncers], nonce, name, to_ms(ttl_s))
        return tuple(sorted(one.decode(errors="replace") for one in live))

    async def withdraw_syncer(self, nonce: str) -> None:
        await self._redis.command("HDEL", self.keys.syncers, nonce)

    async def read_syncers(self) -> dict[str, str]:
        now_ms, found = await self._redis.script("read_syncers", [self.keys.syncers])
        return stored_values.live_syncers(int(now_ms), pairs(found))
