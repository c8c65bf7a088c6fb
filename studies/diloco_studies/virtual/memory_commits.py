"""What a fragment's owner writes, on the bus in memory: the twin of the scripts `commit`, `republish`, `refuse` ..."""

from collections.abc import Iterable, Mapping

from diloco.pipeline.bus import cluster_slots, schema
from diloco.pipeline.bus.commits import MAX_HEADERS, Commit, Published, Refusal, Republication, Staged
from diloco.pipeline.bus.ports import OwnerWrites
from diloco.pipeline.errors import BadMessage, HeadMoved, LeaseLost, PayloadIncomplete
from diloco.pipeline.messages.fragment import Rewound, WindowChanged, WindowView
from diloco.pipeline.payload.codec import encode
from diloco_studies.virtual.memory_calls import MemoryCalls
from diloco_studies.virtual.memory_store import EntryId, Hash


class MemoryOwnerWrites(MemoryCalls, OwnerWrites):
    """Commits, republications, refusals and windows."""

    def _owned(self, key: str, nonce: str) -> None:
        if self._bytes(key) != nonce.encode():
            raise LeaseLost(f"{key} is not held by this owner")

    def _owner_checks(self, p: int, nonce: str, *streams: str) -> Hash:
        """Types first, then the lease; returns the head."""
        self._bytes(self.keys.lease(p))
        head = self._hash(self.keys.head(p))
        for key in (self.keys.tape(self.keys.group(p)), *streams):
            self._stream(key)
        self._owned(self.keys.lease(p), nonce)
        return head

    def _expect(self, p: int, head: Hash, expected: tuple[int, bytes] | None) -> None:
        version = head.get(b"version")
        now = (schema.decode_count("version", version), head.get(b"digest", b"")) if version else None
        if now != expected:
            raise HeadMoved(f"the head of fragment {p} is at {now and now[0]}")

    def _add(self, head: Hash, totals: Mapping[str, int]) -> dict[str, bytes]:
        sums = {name: schema.decode_count(name, head.get(name.encode())) + more for name, more in totals.items()}
        if max(sums.values()) >= schema.COUNTER_LIMIT:
            raise BadMessage("a total of the head is out of bounds")
        return {name: b"%d" % total for name, total in sums.items()}

    def _room(self, head: Hash, name: str, more: int) -> int:
        return schema.room(schema.decode_count(name, head.get(name.encode())), more)

    def _headers(self, p: int, entries: Iterable[str]) -> dict[str, list[tuple[EntryId, str]]]:
        """Streams and the entries named of each, with their marks."""
        found = schema.by_learner(entries)
        return {
            self.keys.deltas(p, learner): [(schema.entry_id(at), mark) for at, mark in ones]
            for learner, ones in found.items()
        }

    def _pending(self, headers: Mapping[str, list[tuple[EntryId, str]]]) -> list[tuple[str, EntryId]]:
        """Those that are there: the very ones, where they have a mark."""
        found: list[tuple[str, EntryId]] = []
        for key, ones in headers.items():
            for at, mark in ones:
                data = self._stream(key).get(at)
                if data is not None and mark in ("", schema.mark_of(data)):
                    found.append((key, at))
        return found

    def _delete(self, headers: Iterable[tuple[str, EntryId]], keys: Iterable[str]) -> None:
        for key, at in headers:
            self._stream(key).delete(at)
        for key in keys:
            self.store.delete(key)

    async def commit(self, commit: Commit) -> None:
        p = schema.fragment_of(commit)
        keys = self.keys
        staged = commit.published.payloads
        headers = self._headers(p, commit.entries)
        gone = (*commit.delta_payloads, *commit.retired)
        cluster_slots.one_slot((keys.head(p), *(s.key for s in staged), *gone))
        await self._turn()
        head = self._owner_checks(p, commit.nonce, *headers, *(s.key for s in staged))
        self._expect(p, head, commit.expected)
        replaced, old_momentum = self._replaced(head, commit.published)
        lost = {name.encode(): total for name, total in schema.lost_totals(commit).items()}
        had = {**head, **lost}
        merged_tokens = self._room(had, "merged_tokens", commit.merged_tokens)
        totals = {"merged_deltas": len(commit.record.contributions), "merged_tokens": merged_tokens}
        sums = self._add(had, {**totals, "rejected_tokens": 0})
        self._keep(staged)
        self.store.hset(keys.head(p), {**schema.head_fields(commit), **sums})
        self._xadd(keys.tape(keys.group(p)), encode(commit.record))
        for old in replaced:
            self._expire(old, commit.replaced_ttl_s)
        self._delete(self._pending(headers), (*gone, old_momentum))

    def _replaced(self, head: Hash, of: Published) -> tuple[list[str], str]:
        return schema.replaced_by(of, [head.get(name.encode(), b"") for name in schema.NAMED])

    def _keep(self, staged: Iterable[Staged]) -> None:
        """Make payloads stay that are whole, all of them or none."""
        for s in staged:
            if (have := len(self._stream(s.key).ids)) != s.chunks:
                raise PayloadIncomplete(f"{s.key} has {have} of {s.chunks} chunks")
        for s in staged:
            self.store.expiries.pop(s.key, None)

    async def republish(self, fragment: int, anew: Republication) -> None:
        key, staged = self.keys.head(fragment), anew.published.payloads
        cluster_slots.one_slot((key, *(s.key for s in staged)))
        await self._turn()
        head = self._owner_checks(fragment, anew.nonce, *(s.key for s in staged))
        self._expect(fragment, head, anew.expected)
        replaced, old_momentum = self._replaced(head, anew.published)
        self._keep(staged)
        self.store.hset(key, schema.payload_fields(anew.published))
        for old in replaced:
            self._expire(old, anew.replaced_ttl_s)
        self._delete((), (old_momentum,))

    async def refuse(self, fragment: int, refusal: Refusal) -> None:
        keys = self.keys
        headers = self._headers(fragment, refusal.entries)
        flooded = [keys.deltas(fragment, refusal.cut)] if refusal.cut else []
        cluster_slots.one_slot((keys.head(fragment), *refusal.delta_payloads))
        await self._turn()
        head = self._owner_checks(fragment, refusal.nonce, *headers, *flooded)
        self._expect(fragment, head, refusal.expected)
        surplus = [(key, at) for key in flooded for at in self._stream(key).ids[:-MAX_HEADERS]]
        if flooded and not surplus:
            return
        counts = {schema.refused_field(r): len(surplus) or n for r, n in refusal.counts().items()}
        sums = self._add(head, {"rejected_tokens": self._room(head, "rejected_tokens", refusal.lost_tokens), **counts})
        pending = self._pending(headers)
        if headers and not pending:
            return  # refused before; counted and recorded then
        self._delete([*pending, *surplus], refusal.delta_payloads)
        self.store.hset(keys.head(fragment), sums)
        for record in refusal.records:
            self._xadd(keys.tape(keys.group(fragment)), encode(record))

    async def write_window(
        self,
        fragment: int,
        nonce: str,
        expected: tuple[int, bytes],
        window: WindowView,
        record: WindowChanged | Rewound | None,
    ) -> None:
        await self._turn()
        self._expect(fragment, self._owner_checks(fragment, nonce), expected)
        self.store.hset(self.keys.head(fragment), {"window": encode(window)})
        if record is not None:
            self._xadd(self.keys.tape(self.keys.group(fragment)), encode(record))
