"""How `MemoryBus` reaches its store: one call at a time, values by type, expiries, and reads that wait."""

import asyncio
from collections.abc import Mapping
from math import inf

from diloco.pipeline.bus import schema
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import BusInfo, Clock, Connection
from diloco.pipeline.bus.stored_reports import Known
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.spec import Spec
from diloco_studies.virtual.memory_store import EntryId, Hash, MemoryStore, Stream


class MemoryCalls(Connection):
    """The state of a bus in memory, and what all its methods are made of."""

    def __init__(self, run: str, clock: Clock, store: MemoryStore | None = None) -> None:
        self.keys = RunKeys(run)
        self._fragments = 0
        self.store = store or MemoryStore()
        self.clock = clock
        self._closed = False
        self._breaks = 0
        self._known: Known = {}
        self._waiters: dict[asyncio.Event, None] = {}

    def use_spec(self, spec: Spec) -> None:
        self.keys = RunKeys(self.keys.run, spec.sync.groups)
        self._fragments = spec.sync.fragments

    async def info(self) -> BusInfo:
        await self._turn()
        return BusInfo(f"memory-{self.store.starts}", "7.0.0", self.store.maxmemory_bytes, self.store.used_bytes())

    async def close(self) -> None:
        self._closed = True
        self.disconnect()

    def disconnect(self) -> None:
        """The connection breaks: reads that wait end with `BusUnavailable`; the next call finds a new one."""
        self._breaks += 1
        for waiter in self._waiters:
            waiter.set()

    async def _turn(self) -> None:
        """A call reaches the server."""
        await asyncio.sleep(0)
        if self._closed:
            raise BusUnavailable("the bus is closed")

    def _unix_ms(self) -> int:
        return int(self.clock.unix() * 1000)

    def _bytes(self, key: str) -> bytes | None:
        value: bytes | None = self.store.get(key, bytes, self.clock.now())
        return value

    def _hash(self, key: str) -> Hash:
        """A hash to read; one that does not exist reads as empty."""
        value: Hash | None = self.store.get(key, dict, self.clock.now())
        return {} if value is None else value

    def _stream(self, key: str) -> Stream:
        """A stream to read; one that does not exist reads as empty."""
        value: Stream | None = self.store.get(key, Stream, self.clock.now())
        return Stream() if value is None else value

    def _set(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        self.store.delete(key)
        self.store.values[key] = value
        if ttl_s is not None:
            self._expire(key, ttl_s)

    def _expire(self, key: str, ttl_s: float) -> None:
        if key in self.store.values:
            self.store.expiries[key] = self.clock.now() + ttl_s

    def _expires(self, key: str) -> bool:
        return key in self.store.expiries

    def _xadd(self, key: str, data: bytes, at: EntryId | None = None) -> str:
        stream = self.store.stream(key)
        if at is None:
            now = (self._unix_ms(), 0)
            at = now if now > stream.last else (stream.last[0], stream.last[1] + 1)
        self.store.wake(key)
        return stream.append(at, data)

    async def _propose(self, key: str, value: bytes) -> bytes:
        await self._turn()
        holds = self._bytes(key)
        if holds is None:
            self.store.need_room()
            self._set(key, value)
        return value if holds is None else holds

    def _bound(self, key: str, max_s: float, ttl_s: float | None = None) -> None:
        until_s = self.clock.now() + max_s
        if self.store.expiries.get(key, inf) > until_s:
            self._expire(key, ttl_s or max_s)

    async def _claim(self, key: str, nonce: str | bytes, ttl_s: float, max_s: float | None = None) -> bool:
        await self._turn()
        value = nonce.encode() if isinstance(nonce, str) else nonce
        if self._bytes(key) not in (None, value):
            self._bound(key, max_s or ttl_s, ttl_s)
            return False
        self._set(key, value, ttl_s)
        return True

    async def _read(
        self, cursors: Mapping[str, str], limit: int, block_s: float
    ) -> list[tuple[str, list[tuple[str, bytes]]]]:
        """XREAD: entries after the cursors, by key; waits up to `block_s` for the first."""
        await self._turn()
        after = {key: schema.entry_id(cursor) for key, cursor in cursors.items()}

        def look() -> list[tuple[str, list[tuple[str, bytes]]]]:
            found = [(key, self._stream(key).after(cursor, limit)) for key, cursor in after.items()]
            return [(key, entries) for key, entries in found if entries]

        found = look()
        if found or block_s <= 0:
            return found
        waiter, breaks = asyncio.Event(), self._breaks
        self._waiters[waiter] = None
        self.store.enlist(after, waiter)
        try:
            async with asyncio.timeout(block_s):
                while not (found := look()):
                    waiter.clear()
                    await waiter.wait()
                    if self._breaks != breaks:
                        raise BusUnavailable("the connection was lost")
        except TimeoutError:
            return []
        finally:
            self.store.discharge(after, waiter)
            del self._waiters[waiter]
        return found
