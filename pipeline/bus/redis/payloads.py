"""Payloads on Redis: a stream each, whose entries are the chunks."""

from collections.abc import Sequence
from contextlib import suppress

from diloco.pipeline.bus import stored_values
from diloco.pipeline.bus.ports import PayloadStore
from diloco.pipeline.bus.redis.calls import to_ms
from diloco.pipeline.bus.redis.connection import RedisConnection
from diloco.pipeline.errors import NotPermitted
from diloco.pipeline.payload.codec import ChunkParts, Encoded


class RedisPayloadStore(RedisConnection, PayloadStore):
    """Chunk `i` is the entry `i-0`."""

    async def write_chunks(self, key: str, first: int, chunks: Sequence[Encoded], ttl_s: float) -> None:
        stored_values.check_chunks(first, chunks)
        calls = [((key,), (i, to_ms(ttl_s), chunk)) for i, chunk in enumerate(chunks, first)]
        if len(chunks) <= 2 or not isinstance(chunks[0], ChunkParts):
            await self._redis.scripts("write_chunk", calls)
            return
        # A script copies its arguments three times over, which costs the server twice what the chunk does. So the first
        # chunk finds out whether those before it are here, and the last one whether all between are; these are added
        # plainly, under their ids: one that is here is left alone, and what has expired is not made anew.
        await self._redis.scripts("write_chunk", calls[:1])
        between = [
            ("XADD", key, "NOMKSTREAM", f"{i + 1}-0", "c", chunk) for i, chunk in enumerate(chunks[1:-1], first + 1)
        ]
        await self._redis.scripts("write_chunk", calls[-1:], between)

    async def count_chunks(self, key: str) -> int:
        return int(await self._redis.command("XLEN", key))

    async def read_chunks(
        self, key: str, first: int, limit: int, block_s: float = 0.0, extend_s: float = 0.0
    ) -> list[bytes | memoryview]:
        if extend_s > 0:
            with suppress(NotPermitted):  # to let a global live on is to write it: without that, be quick or begin anew
                await self._redis.script("extend", [key], to_ms(extend_s))
        return await self._redis.read_payload(key, f"{first}-0", limit, block_s)
