"""Counts what a run has on a Redis server or cluster, key by key; for audits."""

import time

from diloco.pipeline.bus.keys import PREFIX
from diloco.pipeline.bus.redis.calls import RedisCalls
from diloco.pipeline.bus.redis.connecting import connect_calls
from diloco_studies.strikes.growth import KeyUsage, count

LENGTH = {b"stream": "XLEN", b"hash": "HLEN", b"string": "EXISTS"}
"""Command that tells how many entries there are; a string is one."""


class RedisKeyUsage:
    """A connection of its own for counting; made by `connect_key_usage`."""

    def __init__(self, calls: RedisCalls, run: str) -> None:
        self._calls, self._pattern = calls, f"{PREFIX}{{{run}[:}}]*"

    async def measure(self) -> KeyUsage:
        """Count now. Keys that come or go meanwhile may be missed.

        Raises:
            BusUnavailable: Redis is away.
        """
        names = [key async for some in self._calls.keys(self._pattern) for key in some]
        types = await self._calls.run_pipeline(("TYPE", key) for key in names)
        known = [(key, LENGTH[kind]) for key, kind in zip(names, types, strict=True) if kind in LENGTH]
        lengths = await self._calls.run_pipeline((command, key) for key, command in known)
        sizes = await self._calls.run_pipeline(("MEMORY", "USAGE", key) for key, _ in known)
        counted = (
            (key.decode(), int(length), int(size or 0))
            for (key, _), length, size in zip(known, lengths, sizes, strict=True)
        )
        info = await self._calls.info()
        return KeyUsage(time.time(), info.used_bytes, count(counted))

    async def close(self) -> None:
        """Close the connection."""
        await self._calls.close()


async def connect_key_usage(url: str, run: str) -> RedisKeyUsage:
    """Reach a run on a Redis server or cluster.

    Raises:
        UsageError, BusUnavailable: as `redis_streams.connect`.
    """
    return RedisKeyUsage(await connect_calls(url), run)
