"""The runs of a Redis server or cluster: what each takes there, and freeing one. For operators."""

from collections.abc import Mapping
from dataclasses import dataclass

import redis.exceptions as rx

from diloco.pipeline.bus.keys import PREFIX, run_of
from diloco.pipeline.bus.redis.calls import RedisCalls
from diloco.pipeline.bus.redis.connecting import connect_calls


@dataclass(frozen=True, slots=True)
class Taken:
    """What a run takes of the server."""

    keys: int = 0
    bytes: int = 0
    """Memory, as Redis reckons it."""
    permitted: bool = True
    """This user may look at all of it."""


class RedisRuns:
    """A connection for all runs; made by `connect_runs`."""

    def __init__(self, calls: RedisCalls) -> None:
        self._calls = calls

    async def taken(self) -> Mapping[str, Taken]:
        """By name of the run. Keys that come or go meanwhile may be missed.

        Raises:
            BusUnavailable: Redis is away.
            NotPermitted: this user may not even see which keys there are.
        """
        found: dict[str, Taken] = {}
        async for keys in self._calls.keys(f"{PREFIX}{{*"):
            asked = (("MEMORY USAGE", key) for key in keys)
            sizes = await self._calls.many(asked, but_for=rx.NoPermissionError)
            for key, size in zip(keys, sizes, strict=True):
                if (run := run_of(key)) and size is not None:
                    before = found.get(run, Taken())
                    if isinstance(size, rx.NoPermissionError):
                        found[run] = Taken(before.keys + 1, before.bytes, permitted=False)
                    else:
                        found[run] = Taken(before.keys + 1, before.bytes + int(size), before.permitted)
        return found

    async def free(self, run: str) -> int:
        """Delete all keys of a run; returns how many there were.

        Raises:
            BusUnavailable: Redis is away. Some of them may be gone.
            NotPermitted: this user may not.
        """
        freed = 0
        for pattern in (f"{PREFIX}{{{run}}}:*", f"{PREFIX}{{{run}:*}}:*"):
            async for keys in self._calls.keys(pattern):
                freed += sum(await self._calls.many(("UNLINK", key) for key in keys))
        return freed

    async def close(self) -> None:
        """Close the connection."""
        await self._calls.close()


async def connect_runs(url: str) -> RedisRuns:
    """Reach all runs of a Redis server.

    Raises:
        UsageError, BusUnavailable: as `redis_streams.connect`.
    """
    return RedisRuns(await connect_calls(url))
