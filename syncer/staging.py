"""Payloads of one fragment on the bus: staged for a commit, and replaced ones until they must go. asyncio."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pipeline.chunks import Payload
from pipeline.codec import chunk_count, payload_bytes
from pipeline.commits import Rest, Staged, named
from pipeline.fragments import FragmentLayout
from pipeline.head_messages import Head
from pipeline.payload_messages import Update
from pipeline.payloads import push_growing
from pipeline.ports import Clock, PayloadStore
from pipeline.spec_messages import SyncSpec

from .room import Room

T = TypeVar("T")

STAGED_TTL_S = 120.0
"""A payload staged for a commit that never came is gone after this."""
REPLACED_TTL_S = 120.0
REPLACED_BYTES = 256 * 2**20
"""Replaced globals of one fragment live until they are this old, or together this large."""

RandomHex = Callable[[int], str]
"""`random_hex(n)`: 2n hex digits for a nonce; injected, so that a simulated run can be repeated."""


KEPT_UPDATES = 4
"""The last so many updates stay for learners that have not the version before: more of them are more bytes than the
values."""


@dataclass(frozen=True, slots=True)
class Published:
    """What a head names once a merge is committed; as `Commit`."""

    payload: Staged
    rest: Rest | None
    momentum: Staged | None
    updates: tuple[Update, ...] = ()
    behind: int = 0

    @property
    def keys(self) -> frozenset[str]:
        """All payloads."""
        return frozenset(one.key for one in named(self.payload, self.rest, self.momentum, self.updates))


def key_frame_due(sync: SyncSpec, fragment: int, version: int) -> bool:
    """Whether a version is published whole, where globals are updates: fragments take turns."""
    return (version + fragment) % sync.key_frame_interval == 0


class Staging:
    """What an owner has uploaded of its fragment."""

    def __init__(
        self,
        bus: PayloadStore,
        clock: Clock,
        layout: FragmentLayout,
        sync: SyncSpec,
        random_hex: RandomHex = secrets.token_hex,
    ) -> None:
        self._bus, self._clock, self._p = bus, clock, layout.id
        self._elements, self._sync, self._random_hex = layout.elements, sync, random_hex
        self._replaced: deque[tuple[tuple[str, ...], float, int]] = deque()

    async def stage(
        self, head: Head, room: Room, averaged: bool, merging: Coroutine[Any, Any, T]
    ) -> tuple[T, Published]:
        """Upload what a merge makes while it makes the rest, under fresh keys; they expire unless a commit keeps them.

        Args:
            head: of the version that is merged into.
            room: what `merging` writes to.
            averaged: as `Update`.
            merging: the work.

        Returns:
            What `merging` returned, and what the next head names.
        """
        version, loop = head.version + 1, asyncio.get_running_loop()
        whole = room.update is None or key_frame_due(self._sync, self._p, version)
        uploads = self._uploads(room, whole)
        events = [asyncio.Event() for _ in uploads]
        room.more = lambda: loop.call_soon_threadsafe(_set, events)
        tasks = {}
        for (name, (payload, key_of)), more in zip(uploads.items(), events, strict=True):
            key = key_of(self._p, version, self._random_hex(8))
            pushing = push_growing(self._bus, key, payload, self._sync.chunk_bytes, STAGED_TTL_S, more)
            tasks[name] = asyncio.create_task(pushing)
        try:
            merged = await merging
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        staged = {name: task.result() for name, task in tasks.items()}
        return merged, self._published(head, room, averaged, whole, staged)

    def _uploads(self, room: Room, whole: bool) -> dict[str, tuple[Payload, Callable[[int, int, str], str]]]:
        """What of a merge goes to the bus, and the names of its keys."""
        keys = self._bus.keys
        found: dict[str, tuple[Payload, Callable[[int, int, str], str]]] = {}
        if room.update is not None:
            found["update"] = room.update.payload, keys.update_payload
        if room.merged is not None:
            found["merged"] = room.merged.payload, keys.merged_payload
        if room.halves is not None:
            found |= {
                "global": (room.halves.high, keys.global_payload),
                "rest": (room.halves.low, keys.rest_payload),
            }
        elif whole:
            found["global"] = room.payload, keys.global_payload
        if room.momentum_payload is not None and whole:
            found["momentum"] = room.momentum_payload, keys.momentum_payload
        return found

    def _published(
        self, head: Head, room: Room, averaged: bool, whole: bool, staged: Mapping[str, Staged]
    ) -> Published:
        rest, momentum = None, staged.get("momentum")
        if room.halves is not None:
            low = staged["rest"]
            rest = Rest(low.key, low.chunks, room.halves.high.digest)
        if room.update is None:
            return Published(staged["global"], rest, momentum)
        led = staged["update"]
        merged = staged["merged"].key if "merged" in staged else ""
        update = Update(payload=led.key, chunks=led.chunks, base=head.digest, averaged=averaged, merged=merged)
        behind = 0 if whole else head.behind + 1
        if not whole and head.momentum:
            momentum = Staged(head.momentum, chunk_count(self._elements, "fp32", self._sync.chunk_bytes))
        payload = staged["global"] if whole else Staged(head.payload, head.chunks)
        return Published(payload, None, momentum, (*head.updates, update)[-max(behind, KEPT_UPDATES) :], behind)

    def retire(self, head: Head, published: Published) -> tuple[str, ...]:
        """Keys of replaced globals that must go before their time, oldest first (byte cap).

        head: what is replaced. After a rewind it may name again what was replaced before.
        """
        kept, now = published.keys, self._clock.now()
        update_bytes = payload_bytes(self._elements, "int8")
        led = (key for update in head.updates for key in update.payloads)
        sizes = {key: update_bytes for key in led if key not in kept}
        if head.payload not in kept:
            sizes |= {head.payload: 4 * self._elements} | ({head.rest: 0} if head.rest else {})
        self._replaced.append((tuple(sizes), now, nbytes := sum(sizes.values())))
        while self._replaced and now - self._replaced[0][1] > REPLACED_TTL_S:
            self._replaced.popleft()
        retired: list[str] = []
        while sum(size for _, _, size in self._replaced) > max(REPLACED_BYTES, nbytes):
            retired += self._replaced.popleft()[0]
        return tuple(key for key in retired if key not in kept)


def _set(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
