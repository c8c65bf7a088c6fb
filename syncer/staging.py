"""Payloads of one fragment on the bus: staged for a commit, and replaced ones until they must go. asyncio."""

from collections import deque
from collections.abc import Callable
from typing import Any

from pipeline.payloads import push
from pipeline.ports import Bus, Clock, Staged

STAGED_TTL_S = 120.0
"""A payload staged for a commit that never came is gone after this."""
REPLACED_TTL_S = 120.0
REPLACED_BYTES = 256 * 2**20
"""Replaced globals of one fragment live until they are this old, or together this large."""

RandomHex = Callable[[int], str]
"""`random_hex(n)`: 2n hex digits for a nonce; injected, so that a simulated run can be repeated."""


class Staging:
    """What an owner has uploaded of its fragment."""

    def __init__(self, bus: Bus, clock: Clock, fragment: int, chunk_bytes: int, random_hex: RandomHex) -> None:
        self._bus, self._clock, self._p = bus, clock, fragment
        self._chunk_bytes, self._random_hex = chunk_bytes, random_hex
        self._replaced: deque[tuple[str, float, int]] = deque()

    async def stage(self, kind: str, version: int, values: Any) -> Staged:
        """Upload a flat array (elements,) under a fresh key; it expires unless a commit makes it stay.

        kind: "global" or "momentum".
        """
        keys = self._bus.keys
        name = keys.global_payload if kind == "global" else keys.momentum_payload
        key = name(self._p, version, self._random_hex(8))
        return await push(self._bus, key, values, self._chunk_bytes, STAGED_TTL_S)

    def retire(self, replaced: str, nbytes: int) -> tuple[str, ...]:
        """Replaced globals that must go before their time, oldest first (byte cap)."""
        now = self._clock.now()
        self._replaced.append((replaced, now, nbytes))
        while self._replaced and now - self._replaced[0][1] > REPLACED_TTL_S:
            self._replaced.popleft()
        retired = []
        while sum(size for _, _, size in self._replaced) > max(REPLACED_BYTES, nbytes):
            retired.append(self._replaced.popleft()[0])
        return tuple(retired)
