"""Behind the bus: what is really stored, and ways to plant what no party would write.

The same few verbs for the memory store and for a Redis server, so that one table of cases serves both.
"""

from typing import Any, Literal

import redis as redis_py

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.clock import LoopClock
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.memory_store import MemoryStore, Stream
from tests import HANGING_S

Kind = Literal["string", "hash", "stream"]


class MemoryBackdoor:
    """A memory store that plays the server."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.store = MemoryStore()

    async def connect(self) -> Bus:
        return MemoryBus(self.run, LoopClock(), self.store)

    def dump(self) -> dict[str, tuple[Any, bool]]:
        """Every live key: its value, and whether it expires."""
        now, found = LoopClock().now(), {}
        for key in list(self.store.values):
            value = self.store.get(key, object, now)
            if isinstance(value, Stream):
                value = list(zip(value.ids, value.data, strict=True))
            elif isinstance(value, dict):
                value = dict(value)
            if value is not None:
                found[key] = (value, key in self.store.expiries)
        return found

    def ttl_s(self, key: str) -> float | None:
        expiry = self.store.expiries.get(key)
        return None if expiry is None else expiry - LoopClock().now()

    def plant(self, key: str, kind: Kind, string: bytes = b"x") -> None:
        """Put a value of a type at a key."""
        self.store.delete(key)
        self.store.values[key] = {"string": string, "hash": {b"x": b"x"}, "stream": Stream()}[kind]
        if kind == "stream":
            self.store.stream(key).append((1, 0), b"x")

    def hset(self, key: str, field: str, value: bytes) -> None:
        self.store.hset(key, {field: value})

    def append(self, key: str, data: bytes, ms: int = 0) -> None:
        """Add raw bytes to a stream of messages; `ms`: of the entry's id."""
        stream = self.store.stream(key)
        stream.append((ms or stream.last[0] + 1, 0), data)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def fill_memory(self) -> None:
        """From here on, no write that needs memory."""
        self.store.maxmemory_bytes = 1
        self.store.values["ballast"] = b"xx"

    def free_memory(self) -> None:
        self.store.maxmemory_bytes = 0


class RedisBackdoor:
    """A Redis server, through a client of the test's own."""

    def __init__(self, run: str, url: str) -> None:
        self.run = run
        self.url = url
        self.client: Any = redis_py.Redis.from_url(url, protocol=2, socket_timeout=HANGING_S)

    async def connect(self) -> Bus:
        return await connect(self.url, self.run)

    def dump(self) -> dict[str, tuple[Any, bool]]:
        found = {}
        for key in sorted(self.client.scan_iter(f"*{{{self.run}*", count=1000)):
            kind = self.client.type(key)
            if kind == b"string":
                value: Any = self.client.get(key)
            elif kind == b"hash":
                value = self.client.hgetall(key)
            else:
                value = self.client.xrange(key)
            found[key.decode()] = (value, self.client.pttl(key) >= 0)
        return found

    def ttl_s(self, key: str) -> float | None:
        ms = self.client.pttl(key)
        return None if ms < 0 else ms / 1000

    def plant(self, key: str, kind: Kind, string: bytes = b"x") -> None:
        self.client.delete(key)
        if kind == "string":
            self.client.set(key, string)
        elif kind == "hash":
            self.client.hset(key, "x", b"x")
        else:
            self.client.xadd(key, {"x": b"x"}, "1-0")

    def hset(self, key: str, field: str, value: bytes) -> None:
        self.client.hset(key, field, value)

    def append(self, key: str, data: bytes, ms: int = 0) -> None:
        self.client.xadd(key, {"m": data}, f"{ms}-0" if ms else "*")

    def delete(self, key: str) -> None:
        self.client.delete(key)

    def fill_memory(self) -> None:
        self.client.config_set("maxmemory", 1)

    def free_memory(self) -> None:
        self.client.config_set("maxmemory", 0)


Backdoor = MemoryBackdoor | RedisBackdoor
