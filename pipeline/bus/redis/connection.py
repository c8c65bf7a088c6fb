"""The base class of all parts of the bus on Redis: the run's keys and the connection, as one shared state."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import structlog

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import BusInfo, Connection
from diloco.pipeline.bus.redis.calls import RedisCalls, to_ms
from diloco.pipeline.bus.redis.redis_errors import refused
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.spec import Spec


def held(answer: Any) -> bool:
    """Return whether a claim is held, from the script's answer for one key; raise if that is an error."""
    if isinstance(answer, list):
        raise refused(answer)
    return bool(answer)


class RedisConnection(Connection):
    """The state of a bus on Redis: every part inherits it, so `RedisBus` has it once."""

    def __init__(self, calls: RedisCalls, run: str) -> None:
        self.keys = RunKeys(run)
        self.clock = LoopClock(calls.ahead_s)
        self._fragments = 0
        self._redis = calls
        self._warned_s: dict[str, float] = {}

    def use_spec(self, spec: Spec) -> None:
        self.keys = RunKeys(self.keys.run, spec.sync.groups)
        self._fragments = spec.sync.fragments

    async def info(self) -> BusInfo:
        return await self._redis.info()

    async def ensure_scripts(self) -> None:
        """Check that the servers have all scripts, and load missing ones if this user has the right.

        Raises:
            ScriptsMissing: some are missing, and this user may not load them.
            BusUnavailable: there is no answer.
        """
        await self._redis.ensure_scripts()

    async def close(self) -> None:
        await self._redis.close()

    def _warn(self, event: str, **said: object) -> None:
        """Log a warning, at most once in `warn_s` per event."""
        now = asyncio.get_running_loop().time()
        if now - self._warned_s.get(event, -math.inf) >= BUS_TIMES.warn_s:
            self._warned_s[event] = now
            structlog.get_logger().warning(event, **said)

    async def _propose(self, key: str, value: bytes) -> bytes:
        """Set a key that has no value to this one; return the value that it has now."""
        holds = await self._redis.command("GET", key)  # first, since SETNX is refused when memory is short
        if holds is None:
            _, holds = await self._redis.run_pipeline([("SETNX", key, value), ("GET", key)])
        if holds is None:
            raise BusUnavailable(f"{key} disappeared right after it was set")
        return bytes(holds)

    async def _claim(self, key: str, nonce: str | bytes, ttl_s: float, max_s: float | None = None) -> bool:
        """Take an expiring key, or prolong it under the same nonce; return whether it is held.

        max_s: if another's claim would last longer than this, or never expires, it is shortened to `ttl_s`. None:
            `ttl_s` is the limit.
        """
        (answer,) = await self._claim_all([key], nonce, ttl_s, max_s or ttl_s)
        return held(answer)

    async def _claim_all(self, keys: Sequence[str], nonce: str | bytes, ttl_s: float, max_s: float) -> list[Any]:
        return await self._redis.script("claim", keys, nonce, to_ms(ttl_s), to_ms(max_s), lane="leases")
