"""The runs of a Redis server or cluster: listing their memory use, and deleting one. For operators."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.exceptions as rx

from diloco.pipeline.bus.keys import PREFIX, run_of
from diloco.pipeline.bus.redis.calls import RedisCalls
from diloco.pipeline.bus.redis.connecting import connect_calls


@dataclass(frozen=True, slots=True)
class Taken:
    """The keys and memory that a run uses on the server."""

    keys: int = 0
    bytes: int = 0
    """Memory by Redis's own estimate (MEMORY USAGE)."""
    permitted: bool = True
    """False if this user may not look at some of the keys; their memory is missing from `bytes`."""


class RedisRuns:
    """A connection for all runs; made by `connect_runs`."""

    def __init__(self, calls: RedisCalls) -> None:
        self._calls = calls

    async def names(self) -> list[str]:
        """Return the names of all runs, sorted. Raises as `taken`."""
        return sorted({run_of(key) async for keys in self._calls.keys(f"{PREFIX}{{*") for key in keys} - {""})

    async def taken(self) -> Mapping[str, Taken]:
        """Return each run's use by its name. Keys added or deleted meanwhile may be missed.

        Raises:
            BusUnavailable: Redis does not answer.
            NotPermitted: this user may not even list the keys.
        """
        found: dict[str, Taken] = {}
        async for keys in self._calls.keys(f"{PREFIX}{{*"):
            asked = (("MEMORY", "USAGE", key) for key in keys)
            sizes = await self._calls.run_pipeline(asked, but_for=rx.NoPermissionError)
            for key, size in zip(keys, sizes, strict=True):
                if (run := run_of(key)) and size is not None:
                    before = found.get(run, Taken())
                    if isinstance(size, rx.NoPermissionError):
                        found[run] = Taken(before.keys + 1, before.bytes, permitted=False)
                    else:
                        found[run] = Taken(before.keys + 1, before.bytes + int(size), before.permitted)
        return found

    async def free(self, run: str) -> int:
        """Delete all keys of a run; return how many there were.

        Raises:
            BusUnavailable: Redis does not answer. Some keys may have been deleted.
            NotPermitted: this user may not delete them.
        """
        freed = 0
        for pattern in (f"{PREFIX}{{{run}}}:*", f"{PREFIX}{{{run}:*}}:*"):
            async for keys in self._calls.keys(pattern):
                freed += sum(await self._calls.run_pipeline(("UNLINK", key) for key in keys))
        return freed


@asynccontextmanager
async def connect_runs(url: str) -> AsyncIterator[RedisRuns]:
    """Connect to all runs of a Redis server for the duration of a block.

    Raises:
        UsageError, BusUnavailable: see `redis_streams.connect`.
    """
    calls = await connect_calls(url)
    try:
        yield RedisRuns(calls)
    finally:
        await calls.close()
