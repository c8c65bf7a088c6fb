"""What everybody may do with fragments, on the bus in memory: payloads, heads, tape, headers, leases."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from diloco.pipeline.bus import schema
from diloco.pipeline.bus.ports import (
    START,
    FragmentLeases,
    Heads,
    Offered,
    Offers,
    PayloadStore,
    SyncerBoard,
    Tape,
    TapeEntry,
)
from diloco.pipeline.errors import PayloadIncomplete
from diloco.pipeline.messages.fragment import DeltaHeader, Head
from diloco.pipeline.messages.wire import CHUNK_EXTRA_BYTES, MAX_LEASE_S
from diloco.pipeline.payload.codec import ChunkParts, Encoded, encode
from diloco_studies.virtual.memory_calls import MemoryCalls


def whole_chunk(chunk: Encoded) -> bytes:
    """An encoded chunk in one piece."""
    return chunk.joined() if isinstance(chunk, ChunkParts) else chunk


def chunk_size(chunk: Encoded | memoryview) -> int:
    """Bytes of an encoded chunk."""
    return chunk.nbytes if isinstance(chunk, ChunkParts) else len(chunk)


class MemoryFragments(MemoryCalls, PayloadStore, Heads, Tape, Offers, FragmentLeases, SyncerBoard):
    """Payloads, heads to read, tape, headers, leases and syncers."""

    async def write_chunks(self, key: str, first: int, chunks: Sequence[Encoded], ttl_s: float) -> None:
        schema.check_chunks(first, chunks)
        await self._turn()
        for index, chunk in enumerate(chunks, first):
            have = len(self._stream(key).ids)
            kept = have > 0 and not self._expires(key)  # a commit made it stay: it is complete
            if index > have or (kept and index == have):
                raise PayloadIncomplete(f"{key} has {have} chunks, so chunk {index} cannot be next")
            if index == have:
                self.store.need_room()
                self._xadd(key, whole_chunk(chunk), (index + 1, 0))
            if not kept:
                self._expire(key, ttl_s)

    async def count_chunks(self, key: str) -> int:
        await self._turn()
        return len(self._stream(key).ids)

    async def read_chunks(
        self, key: str, first: int, limit: int, chunk_bytes: int, block_s: float = 0.0, extend_s: float = 0.0
    ) -> list[bytes | memoryview]:
        found = await self._read({key: f"{first}-0"}, limit, block_s)
        left_s = self.store.expiries.get(key, float("inf")) - self.clock.now()
        if left_s < extend_s:
            self._expire(key, extend_s)
        chunks: list[bytes | memoryview] = [data for _, entries in found for _, data in entries]
        if sum(map(len, chunks)) > limit * (chunk_bytes + CHUNK_EXTRA_BYTES):
            raise schema.chunks_too_large(key, chunk_bytes)
        return chunks

    async def expire_soon(self, key: str, ttl_s: float) -> None:
        await self._turn()
        if self.store.expiries.get(key, 0.0) - self.clock.now() > ttl_s:
            self._expire(key, ttl_s)

    async def offer(self, header: DeltaHeader, renews: str = "") -> str:
        await self._turn()
        key = self.keys.deltas(header.fragment, header.learner)
        senders = self.keys.senders(self.keys.group(header.fragment))
        arrivals = self.keys.arrivals(self.keys.group(header.fragment))
        _, _, known = self._stream(key), self._stream(arrivals), self._hash(senders)
        self.store.need_room()
        data = encode(header)
        at = self._xadd(key, data)
        before = schema.parse_offer_id(renews)[1] if renews else ""
        if before not in ("", at):
            self._stream(key).delete(schema.entry_id(before))
        if header.learner.encode() not in known:
            self.store.hset(senders, {header.learner: b""})
            self._xadd(arrivals, header.learner.encode())
            self.store.stream(arrivals).keep_last()
        return schema.offer_id(header.learner, at, data)

    async def read_heads(self, fragments: Sequence[int]) -> list[Head | None]:
        await self._turn()
        return [schema.decode_head(p, self._hash(self.keys.head(p))) for p in fragments]

    async def tape_end(self) -> dict[int, str]:
        await self._turn()
        tapes = {group: self._stream(self.keys.tape(group)) for group in range(self.keys.groups)}
        return {group: "{}-{}".format(*tape.ids[-1]) if tape.ids else START for group, tape in tapes.items()}

    async def read_tape(
        self, cursors: Mapping[int, str], block_s: float = 0.0, limit: int = 1000, away: set[int] | None = None
    ) -> list[TapeEntry]:
        groups, now = {self.keys.tape(group): group for group in cursors}, self.clock.now
        after, until = {key: cursors[group] for key, group in groups.items()}, now() + block_s
        while True:
            found = await self._read(after, limit, until - now())
            entries = [one for key, stored in found for one in schema.decode_entries(groups[key], stored)[0]]
            if entries or not found:
                return entries
            after |= {key: stored[-1][0] for key, stored in found}

    async def trim_tape(self, group: int, before: str) -> None:
        await self._turn()
        tape, limit = self._stream(self.keys.tape(group)), schema.entry_id(before)
        for at in tape.ids[: bisect_left(tape.ids, limit)]:
            tape.delete(at)

    async def acquire_lease(self, fragment: int, nonce: str, ttl_s: float, max_s: float = MAX_LEASE_S) -> bool:
        return await self._claim(self.keys.lease(fragment), nonce, ttl_s, max_s)

    async def release_lease(self, fragment: int, nonce: str) -> None:
        await self._turn()
        if self._bytes(self.keys.lease(fragment)) == nonce.encode():
            self.store.delete(self.keys.lease(fragment))

    async def read_leases(self, fragments: Sequence[int]) -> list[str | None]:
        await self._turn()
        found = (self._bytes(self.keys.lease(p)) for p in fragments)
        return [None if holder is None else holder.decode(errors="replace") for holder in found]

    async def announce_syncer(self, nonce: str, name: str, ttl_s: float, saved_tokens: int = 0) -> tuple[str, ...]:
        await self._turn()
        now_ms, found = self._unix_ms(), self._hash(self.keys.syncers)
        live = {*schema.syncer_names(schema.live_syncers(now_ms, found)), nonce}
        for other in [other for other in found if other.decode(errors="replace") not in live]:
            del found[other]
        until_ms = now_ms + max(1, round(1000 * ttl_s))
        self.store.hset(self.keys.syncers, {nonce: f"{until_ms} {saved_tokens} {name} {self.page}".rstrip().encode()})
        return tuple(sorted(live))

    async def withdraw_syncer(self, nonce: str) -> None:
        await self._turn()
        found = self._hash(self.keys.syncers)
        found.pop(nonce.encode(), None)
        if not found:
            self.store.delete(self.keys.syncers)

    async def read_syncers(self) -> dict[str, str]:
        return schema.syncer_names(await self._live())

    async def read_pages(self) -> dict[str, str]:
        return schema.pages(await self._live())

    async def read_savers(self) -> Sequence[tuple[int, str, str]]:
        return schema.savers(await self._live())

    async def _live(self) -> list[schema.LiveSyncer]:
        await self._turn()
        return schema.live_syncers(self._unix_ms(), self._hash(self.keys.syncers))

    async def read_offers(
        self, fragment: int, after: Mapping[str, str] | None = None, block_s: float = 0.0, limit: int = 256
    ) -> list[Offered]:
        await self._turn()
        group = self.keys.group(fragment)
        self._drop_senders(group, after)

        def cursors() -> dict[str, str]:
            return schema.offer_cursors(self._hash(self.keys.senders(group)), after)

        arrivals = self._stream(self.keys.arrivals(group))
        known = {self.keys.deltas(fragment, name): at for name, at in cursors().items()}
        await self._read(known | {self.keys.arrivals(group): "{}-{}".format(*arrivals.last)}, 1, block_s)
        return [
            schema.decode_offer(fragment, name, at, data)
            for name, cursor in cursors().items()
            for at, data in self._stream(self.keys.deltas(fragment, name)).after(schema.entry_id(cursor), limit)
        ]

    def _drop_senders(self, group: int, after: Mapping[str, str] | None) -> None:
        """What is no learner's name goes; where too many are new, those under which nothing is pending."""
        senders = self._hash(self.keys.senders(group))
        for name in [name for name in senders if not schema.is_learner(name)]:
            del senders[name]
        for name in schema.new_senders(senders, after) if self._fragments else ():
            fragments = (p for p in range(self._fragments) if self.keys.group(p) == group)
            if not any(self._stream(self.keys.deltas(p, name.decode())).ids for p in fragments):
                del senders[name]
