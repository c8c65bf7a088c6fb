"""The bus on Redis 6.2 or newer, on one node or a cluster; `ports` documents the contract of each method.

Every atomic step of more than one command is a script under `redis/lua/` (see `_prelude.lua` for their rules).
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis.connecting import connect_calls
from diloco.pipeline.bus.redis.fragment_bus import RedisFragments, RedisOwnerWrites
from diloco.pipeline.bus.redis.run_bus import RedisRunData
from diloco.pipeline.bus.redis.shard_bus import RedisWorkQueue


async def connect(url: str, run: str) -> "RedisBus":
    """Connect to a run on a Redis server or cluster.

    Raises:
        UsageError: the URL is malformed, the login is refused, or the server is older than 6.2.
        BusUnavailable: there is no answer.
    """
    return RedisBus(await connect_calls(url), run)


@asynccontextmanager
async def open_bus(url: str, run: str) -> "AsyncIterator[RedisBus]":
    """Connect to a run (see `connect`) and close the connection on exit."""
    bus = await connect(url, run)
    try:
        yield bus
    finally:
        await bus.close()


class RedisBus(RedisRunData, RedisFragments, RedisOwnerWrites, RedisWorkQueue, Bus):
    """A run on Redis, made by `connect`. All parts share the state of `RedisConnection`."""
