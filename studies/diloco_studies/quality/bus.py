"""A party's connection to the bus in memory, whose calls take virtual time. asyncio."""

import asyncio
from collections.abc import Sequence
from typing import Any

from diloco.pipeline.bus.ports import Clock
from diloco.pipeline.payload.codec import Encoded
from diloco_studies.virtual.memory import MemoryBus, MemoryStore
from diloco_studies.virtual.memory_fragments import chunk_size

RUN = "lab"


class LabBus(MemoryBus):
    """Each call takes `latency_s`; closed, it fails (its party is dead)."""

    def __init__(self, clock: Clock, store: MemoryStore, latency_s: float) -> None:
        super().__init__(RUN, clock, store)
        self._latency_s = latency_s
        self.moved_bytes = 0
        """Of chunks that this party wrote and read."""

    async def _turn(self) -> None:
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        await super()._turn()

    async def write_chunks(self, key: str, first: int, chunks: Sequence[Encoded], ttl_s: float) -> None:
        """Counted."""
        self.moved_bytes += sum(map(chunk_size, chunks))
        await super().write_chunks(key, first, chunks, ttl_s)

    async def read_chunks(self, key: str, first: int, limit: int, *args: Any, **more: Any) -> list[bytes | memoryview]:
        """Counted."""
        chunks = await super().read_chunks(key, first, limit, *args, **more)
        self.moved_bytes += sum(map(len, chunks))
        return chunks
