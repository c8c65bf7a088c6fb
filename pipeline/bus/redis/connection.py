"""The run's names and the way to the server: what all parts of the bus on Redis have. They have one state."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import structlog

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import BusInfo, Connection
from diloco.pipeline.bus.redis.calls import RedisCalls, to_ms
from diloco.pipeline.bus.redis.redis_errors import refused
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.spec import Spec

WARN_S = 60.0
"""Between two warnings of the same."""


def held(answer: Any) -> bool:
    """Whether a claim is held, by what the script said of it."""
    if isinstance(answer, list):
        raise refused(answer)
    return bool(answer)


class RedisConnection(Connection):
    """The state of a bus on Redis."""

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
        """Check that the servers have all scripts; load what is missing, where this user may.

        Raises:
            ScriptsMissing: some are missing, and it may not.
            BusUnavailable: there is no answer.
        """
        await self._redis.ensure_scripts()

    async def close(self) -> None:
        await self._redis.close()

    def _warn(self, event: str, **said: object) -> None:
        """In the log, at most once in a while."""
        now = asyncio.get_running_loop().time()
        if now - self._warned_s.get(event, -math.inf) >= WARN_S:
            self._warned_s[event] = now
            structlog.get_logger().warning(event, **said)

    async def _propose(self, key: str, value: bytes) -> bytes:
        """What a key holds: this value, if it held none."""
        holds = await self._redis.command("GET", key)  # SETNX is refused where memory is short
        if holds is None:
            _, holds = await self._redis.many([("SETNX", key, value), ("GET", key)])
        if holds is None:
            raise BusUnavailable(f"{key} vanished as it was set")
        return bytes(holds)

    async def _claim(self, key: str, nonce: str | bytes, ttl_s: float, most_s: float | None = None) -> bool:
        """most_s: another's that would last for longer, or for ever, ends after `ttl_s`; None: that is the most."""
        (answer,) = await self._claim_all([key], nonce, ttl_s, most_s or ttl_s)
        return held(answer)

    async def _claim_all(self, keys: Sequence[str], nonce: str | bytes, ttl_s: float, most_s: float) -> list[Any]:
        return await self._redis.script("claim", keys, nonce, to_ms(ttl_s), to_ms(most_s), lane="leases")
