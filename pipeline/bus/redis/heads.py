"""Heads and event tapes on Redis, to read; `owner_writes` moves and adds to them."""

from collections.abc import Mapping, Sequence

from diloco.pipeline.bus import stored_values
from diloco.pipeline.bus.ports import START, Heads, Tape, TapeEntry
from diloco.pipeline.bus.redis.connection import RedisConnection
from diloco.pipeline.messages.head import Head
from diloco.pipeline.payload.codec import decode_tape


class RedisHeads(RedisConnection, Heads):
    """A head is a hash (`stored_values`)."""

    async def read_heads(self, fragments: Sequence[int]) -> list[Head | None]:
        found = await self._redis.hashes(self.keys.head(p) for p in fragments)
        return [stored_values.decode_head(p, fields) for p, fields in zip(fragments, found, strict=True)]


class RedisTape(RedisConnection, Tape):
    """A group's tape is a stream."""

    async def tape_end(self) -> dict[int, str]:
        groups = range(self.keys.groups)
        ends = await self._redis.many(("XREVRANGE", self.keys.tape(g), "+", "-", "COUNT", 1) for g in groups)
        return {g: end[0][0].decode() if end else START for g, end in zip(groups, ends, strict=True)}

    async def read_tape(self, cursors: Mapping[int, str], block_s: float = 0.0, limit: int = 1000) -> list[TapeEntry]:
        groups = {self.keys.tape(group): group for group in cursors}
        found = await self._redis.read({key: cursors[group] for key, group in groups.items()}, limit, block_s)
        return [TapeEntry(groups[key], at, decode_tape(data)) for key, entries in found for at, data in entries]

    async def trim_tape(self, group: int, before: str) -> None:
        stored_values.entry_id(before)
        await self._redis.command("XTRIM", self.keys.tape(group), "MINID", "=", before)
