"""Payloads of one fragment on the bus: staged for a commit, and replaced ones until they must go. asyncio."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pipeline.messages import Head
from pipeline.payloads import push_growing
from pipeline.ports import Bus, Clock, Rest, Staged

from .fragment import Room

T = TypeVar("T")

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
        self._replaced: deque[tuple[tuple[str, ...], float, int]] = deque()

    async def stage(
        self, version: int, room: Room, merging: Coroutine[Any, Any, T]
    ) -> tuple[T, Staged, Rest | None, Staged | None]:
        """Upload what a merge makes while it makes the rest, under fresh keys; they expire unless a commit keeps them.

        Args:
            version: that it will be.
            room: what `merging` writes to.
            merging: the work.

        Returns:
            What `merging` returned; the values; their rest and the momentum, if there are any.
        """
        keys, loop = self._bus.keys, asyncio.get_running_loop()
        halves = room.halves
        uploads = [(room.payload if halves is None else halves.high, keys.global_payload)]
        if halves is not None:
            uploads.append((halves.low, keys.rest_payload))
        if room.momentum_payload is not None:
            uploads.append((room.momentum_payload, keys.momentum_payload))
        events = [asyncio.Event() for _ in uploads]
        room.more = lambda: loop.call_soon_threadsafe(_set, events)
        tasks = []
        for (payload, name), more in zip(uploads, events, strict=True):
            key = name(self._p, version, self._random_hex(8))
            pushing = push_growing(self._bus, key, payload, self._chunk_bytes, STAGED_TTL_S, more)
            tasks.append(asyncio.create_task(pushing))
        try:
            merged = await merging
            values, *others = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        rest = None
        if halves is not None:
            low = others.pop(0)
            rest = Rest(low.key, low.chunks, halves.high.digest)
        return merged, values, rest, others[0] if others else None

    def retire(self, head: Head, nbytes: int) -> tuple[str, ...]:
        """Keys of replaced globals that must go before their time, oldest first (byte cap).

        head: what is replaced; its global takes `nbytes`, rest included.
        """
        replaced = tuple(filter(None, (head.payload, head.rest)))
        now = self._clock.now()
        self._replaced.append((replaced, now, nbytes))
        while self._replaced and now - self._replaced[0][1] > REPLACED_TTL_S:
            self._replaced.popleft()
        retired: list[str] = []
        while sum(size for _, _, size in self._replaced) > max(REPLACED_BYTES, nbytes):
            retired += self._replaced.popleft()[0]
        return tuple(retired)


def _set(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
