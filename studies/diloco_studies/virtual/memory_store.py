"""What stands for the server behind `MemoryBus`: typed keys (string, hash, stream) with expiries.

It knows nothing of the protocol, and no clock: the caller says what time it is.
"""

import asyncio
import copy
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.pipeline.errors import BadMessage, BusFull

EntryId = tuple[int, int]


@dataclass(slots=True)
class Stream:
    """Entries in the order of their ids; `delivered` is the consumer group's cursor, None without a group.

    `held`: what the group delivered and nobody acknowledged, as id -> (consumer, when it was delivered, in ms).
    """

    ids: list[EntryId] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    last: EntryId = (0, 0)
    delivered: EntryId | None = None
    held: dict[EntryId, tuple[str, int]] = field(default_factory=dict)

    def after(self, cursor: EntryId, limit: int) -> list[tuple[str, bytes]]:
        """Entries after an id, as (id, bytes)."""
        at = bisect_right(self.ids, cursor)
        return [
            (f"{i[0]}-{i[1]}", d) for i, d in zip(self.ids[at : at + limit], self.data[at : at + limit], strict=True)
        ]

    def append(self, at: EntryId, data: bytes) -> str:
        """Add an entry; its id must be above the last one's."""
        self.ids.append(at)
        self.data.append(data)
        self.last = at
        return f"{at[0]}-{at[1]}"

    def keep_last(self) -> None:
        """Remove all but the last entry."""
        del self.ids[:-1], self.data[:-1]

    def _place(self, at: EntryId) -> int | None:
        index = bisect_left(self.ids, at)
        return index if index < len(self.ids) and self.ids[index] == at else None

    def get(self, at: EntryId) -> bytes | None:
        """An entry, if it is there."""
        index = self._place(at)
        return None if index is None else self.data[index]

    def delete(self, at: EntryId) -> bool:
        """Remove an entry if it is there."""
        index = self._place(at)
        if index is None:
            return False
        del self.ids[index], self.data[index]
        return True


Hash = dict[bytes, bytes]
Value = bytes | Hash | Stream


class MemoryStore:
    """What a server holds.

    Args:
        maxmemory_bytes: above it, writes that need memory raise `BusFull`; 0: no bound.
    """

    def __init__(self, maxmemory_bytes: int = 0) -> None:
        self.maxmemory_bytes = maxmemory_bytes
        self.starts = 1
        self.values: dict[str, Value] = {}
        self.expiries: dict[str, float] = {}
        self._waiters: dict[str, dict[asyncio.Event, None]] = {}  # in order of arrival: woken in that order

    def get(self, key: str, kind: type[Any], now: float) -> Any:
        """The live value of a key, or None.

        Raises:
            BadMessage: it is of another type.
        """
        if self.expiries.get(key, now + 1) <= now:
            self.delete(key)
        value = self.values.get(key)
        if value is not None and not isinstance(value, kind):
            raise BadMessage(f"{key} holds a value of the wrong type")
        return value

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self.values.pop(key, None)
        self.expiries.pop(key, None)

    def hset(self, key: str, fields: Mapping[str, bytes]) -> None:
        """Set fields of a hash; its type was checked by reading it."""
        table: Any = self.values.setdefault(key, {})
        table.update((name.encode(), data) for name, data in fields.items())

    def stream(self, key: str) -> Stream:
        """The stream to write to, made if there is none; its type was checked by reading it."""
        stream: Any = self.values.setdefault(key, Stream())
        made: Stream = stream
        return made

    def used_bytes(self) -> int:
        """Bytes of all values."""
        return sum(
            len(v) if isinstance(v, bytes) else sum(map(len, v.values() if isinstance(v, dict) else v.data))
            for v in self.values.values()
        )

    def need_room(self) -> None:
        """Raise `BusFull` where Redis would refuse a write that needs memory."""
        if self.maxmemory_bytes and self.used_bytes() > self.maxmemory_bytes:
            raise BusFull("memory is full")

    def wake(self, key: str) -> None:
        """Wake those who wait for entries of a stream."""
        for waiter in self._waiters.get(key, ()):
            waiter.set()

    def enlist(self, keys: Iterable[str], waiter: asyncio.Event) -> None:
        """Have a waiter set whenever one of the streams grows."""
        for key in keys:
            self._waiters.setdefault(key, {})[waiter] = None

    def discharge(self, keys: Iterable[str], waiter: asyncio.Event) -> None:
        """Undo `enlist`."""
        for key in keys:
            self._waiters[key].pop(waiter, None)
            if not self._waiters[key]:
                del self._waiters[key]

    def snapshot(self) -> tuple[dict[str, Value], dict[str, float]]:
        """All that is stored now, for `restart`."""
        return copy.deepcopy(self.values), dict(self.expiries)

    def restart(self, saved: tuple[dict[str, Value], dict[str, float]] | None) -> None:
        """Come back as a new server with what was saved (None: nothing), as Redis after a crash."""
        self.starts += 1
        self.values, self.expiries = copy.deepcopy(saved) if saved else ({}, {})
