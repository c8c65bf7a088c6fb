"""The bus in memory: the same steps, checks and stored bytes as on Redis, in the event loop's (virtual) time.

Several buses may share one `MemoryStore`, which stands for the server. Every call gives way to the loop once
before it acts, as a network call would; all of a call's work is then done without giving way, which is what
makes it atomic. A store and its buses belong to one event loop.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from . import stored
from .chunks import Encoded, whole
from .codec import decode, decode_tape, encode
from .commits import Commit, Refusal, Republication, Staged
from .errors import (
    BadMessage,
    HeadMoved,
    LeaseLost,
    PayloadIncomplete,
)
from .memory_shards import MemoryShards
from .memory_store import EntryId, Hash, MemoryStore
from .messages import (
    DeltaHeader,
    Evaluation,
    Event,
    Head,
    InitialUpload,
    LearnerReport,
    Rewound,
    RunState,
    SeenReport,
    WindowChanged,
    WindowView,
)
from .moments_messages import MomentsOffer, MomentsWish
from .ports import START, MomentsBoard, Offered, TapeEntry
from .wire import Message

__all__ = ["MemoryBus", "MemoryStore"]

T = TypeVar("T", bound=Message)


class MemoryBus(MemoryShards):
    """`pipeline.ports.Bus` on a `MemoryStore`; see there for what each method promises."""

    def _owned(self, key: str, nonce: str) -> None:
        if self._bytes(key) != nonce.encode():
            raise LeaseLost(f"{key} is not held by this owner")

    # --- the run as a whole ----------------------------------------------------------------------
    async def propose_spec(self, spec: bytes) -> bytes:
        """Set the spec once."""
        await self._turn()
        holds = self._bytes(self.keys.spec)
        if holds is None:
            self.store.need_room()
            self._set(self.keys.spec, spec)
            return spec
        return holds

    async def read_spec(self) -> bytes | None:
        """The spec."""
        await self._turn()
        return self._bytes(self.keys.spec)

    async def replace_spec(self, spec: bytes, instead_of: bytes) -> bool:
        """Replace the spec."""
        await self._turn()
        if self._bytes(self.keys.spec) != instead_of:
            return False
        self.store.need_room()
        self._set(self.keys.spec, spec)
        return True

    async def write_state(self, state: RunState) -> RunState:
        """Set the run's state, never backwards."""
        await self._turn()
        now = self._hash(self.keys.state)
        if stored.decode_count("rank", now.get(b"rank")) > state.phase.rank:
            return decode(RunState, now[b"blob"])
        self.store.hset(self.keys.state, {"rank": b"%d" % state.phase.rank, "blob": encode(state)})
        return state

    async def read_state(self) -> RunState | None:
        """The run's state."""
        await self._turn()
        return stored.decode_state(self._hash(self.keys.state).get(b"blob"))

    async def write_report(self, report: LearnerReport) -> RunState | None:
        """Replace a report."""
        await self._turn()
        name = f"{report.learner}/{report.incarnation}"
        holder, mine = self.keys.holder(report.learner), stored.holder(report)
        stored.check_holder(holder, self._bytes(holder), mine, report.generation)
        state = self._hash(self.keys.state).get(b"blob")
        before = self._hash(self.keys.learners).get(name.encode())
        self._hash(self.keys.seen)  # types before the first write
        with suppress(BadMessage):
            if before and decode(LearnerReport, before).number > report.number:
                return stored.decode_state(state)
        self._set(holder, mine)
        self.store.hset(self.keys.learners, {name: encode(report)})
        self.store.hset(self.keys.seen, {name: b"%d" % self._unix_ms()})
        return stored.decode_state(state)

    async def put_back_report(self, seen: SeenReport) -> None:
        """Keep a lost report."""
        await self._turn()
        name = f"{seen.report.learner}/{seen.report.incarnation}"
        self._hash(self.keys.seen)  # types before the first write
        if name.encode() not in self._hash(self.keys.learners):
            self.store.hset(self.keys.learners, {name: encode(seen.report)})
            self.store.hset(self.keys.seen, {name: b"%d" % (self._unix_ms() - int(seen.age_s * 1000))})

    async def read_reports(self) -> list[SeenReport]:
        """All reports with their ages."""
        await self._turn()
        seen = self._hash(self.keys.seen)
        return stored.seen_reports(self._unix_ms(), self._hash(self.keys.learners), seen)

    async def _add_capped(self, key: str, message: Message, cap: int) -> None:
        await self._turn()
        stream = self._stream(key)
        self.store.need_room()
        self._xadd(key, encode(message))
        for at in stream.ids[:-cap]:
            stream.delete(at)

    async def _log(self, key: str, kind: type[T], after: str, limit: int) -> list[tuple[str, T]]:
        found = await self._read({key: after}, limit, 0)
        return [(at, decode(kind, data)) for _, entries in found for at, data in entries]

    async def add_event(self, event: Event) -> None:
        """Append an event."""
        await self._add_capped(self.keys.events, event, stored.EVENTS_CAP)

    async def read_events(self, after: str = START, limit: int = 1000) -> list[tuple[str, Event]]:
        """Events."""
        return await self._log(self.keys.events, Event, after, limit)

    async def add_evaluation(self, evaluation: Evaluation) -> None:
        """Append an evaluation."""
        await self._add_capped(self.keys.evaluations, evaluation, stored.EVALUATIONS_CAP)

    async def read_evaluations(self, after: str = START, limit: int = 1000) -> list[tuple[str, Evaluation]]:
        """Evaluations."""
        return await self._log(self.keys.evaluations, Evaluation, after, limit)

    # --- version 0 -------------------------------------------------------------------------------
    async def _claim(self, key: str, nonce: str, ttl_s: float) -> bool:
        await self._turn()
        if self._bytes(key) not in (None, nonce.encode()):
            return False
        self._set(key, nonce.encode(), ttl_s)
        return True

    async def _announce(self, claim: str, key: str, nonce: str, announced: Message, ttl_s: float, *gone: str) -> bool:
        """Say that an upload is complete, if its claim is still held; some keys go with that."""
        await self._turn()
        for other in (key, *gone):
            self._bytes(other)
        if self._bytes(claim) != nonce.encode():
            return False
        self.store.need_room()
        self._set(key, encode(announced), ttl_s)
        for other in gone:
            self.store.delete(other)
        return True

    async def claim_initial(self, nonce: str, ttl_s: float) -> bool:
        """Win or keep the claim."""
        return await self._claim(self.keys.init_claim, nonce, ttl_s)

    async def finish_initial(self, upload: InitialUpload, ttl_s: float) -> bool:
        """Announce a complete upload."""
        return await self._announce(self.keys.init_claim, self.keys.initial, upload.nonce, upload, ttl_s)

    async def read_initial(self) -> InitialUpload | None:
        """The complete upload."""
        await self._turn()
        blob = self._bytes(self.keys.initial)
        return None if blob is None else decode(InitialUpload, blob)

    # --- an inner optimizer's moments ------------------------------------------------------------
    async def ask_moments(self, wish: MomentsWish, ttl_s: float) -> None:
        """Ask, unless somebody did."""
        await self._turn()
        if self._bytes(self.keys.moments_wish) is None:
            self.store.need_room()
            self._set(self.keys.moments_wish, encode(wish), ttl_s)

    async def read_moments(self) -> MomentsBoard:
        """Wish, claim and offer."""
        await self._turn()
        keys = self.keys
        return stored.moments_board(*map(self._bytes, (keys.moments_wish, keys.moments_claim, keys.moments_offer)))

    async def claim_moments(self, nonce: str, ttl_s: float) -> bool:
        """Win or keep the claim."""
        return await self._claim(self.keys.moments_claim, nonce, ttl_s)

    async def finish_moments(self, offer: MomentsOffer, ttl_s: float) -> bool:
        """Announce a complete offer."""
        keys = self.keys
        gone = (keys.moments_wish, keys.moments_claim)
        return await self._announce(keys.moments_claim, keys.moments_offer, offer.nonce, offer, ttl_s, *gone)

    # --- payloads --------------------------------------------------------------------------------
    async def write_chunks(self, key: str, first: int, chunks: Sequence[Encoded], ttl_s: float) -> None:
        """Append chunks."""
        stored.check_chunks(first, chunks)
        await self._turn()
        for index, chunk in enumerate(chunks, first):
            have = len(self._stream(key).ids)
            kept = have > 0 and not self._expires(key)  # a commit made it stay: it is complete
            if index > have or (kept and index == have):
                raise PayloadIncomplete(f"{key} has {have} chunks, so chunk {index} cannot be next")
            if index == have:
                self.store.need_room()
                self._xadd(key, whole(chunk), (index + 1, 0))
            if not kept:
                self._expire(key, ttl_s)

    async def count_chunks(self, key: str) -> int:
        """Length of a payload."""
        await self._turn()
        return len(self._stream(key).ids)

    async def read_chunks(
        self, key: str, first: int, limit: int, block_s: float = 0.0, extend_s: float = 0.0
    ) -> list[bytes | memoryview]:
        """Chunks from an index on."""
        found = await self._read({key: f"{first}-0"}, limit, block_s)
        left_s = self.store.expiries.get(key, float("inf")) - self._clock.now()
        if left_s < extend_s:
            self._expire(key, extend_s)
        return [data for _, entries in found for _, data in entries]

    # --- fragments: learners ---------------------------------------------------------------------
    async def offer(self, header: DeltaHeader) -> str:
        """Append a header."""
        await self._turn()
        key = self.keys.deltas(header.fragment, header.learner)
        senders = self.keys.senders(self.keys.group(header.fragment))
        arrivals = self.keys.arrivals(self.keys.group(header.fragment))
        _, _, known = self._stream(key), self._stream(arrivals), self._hash(senders)
        self.store.need_room()
        at = self._xadd(key, encode(header))
        if header.learner.encode() not in known:
            self.store.hset(senders, {header.learner: b""})
            self._xadd(arrivals, header.learner.encode())
            self.store.stream(arrivals).keep_last()
        return stored.offer_id(header.learner, at)

    async def read_heads(self, fragments: Sequence[int]) -> list[Head | None]:
        """Heads."""
        await self._turn()
        return [stored.decode_head(p, self._hash(self.keys.head(p))) for p in fragments]

    async def tape_end(self) -> dict[int, str]:
        """Cursors at the end of each tape."""
        await self._turn()
        tapes = {group: self._stream(self.keys.tape(group)) for group in range(self.keys.groups)}
        return {group: "{}-{}".format(*tape.ids[-1]) if tape.ids else START for group, tape in tapes.items()}

    async def read_tape(self, cursors: Mapping[int, str], block_s: float = 0.0, limit: int = 1000) -> list[TapeEntry]:
        """Tape entries."""
        groups = {self.keys.tape(group): group for group in cursors}
        found = await self._read({key: cursors[group] for key, group in groups.items()}, limit, block_s)
        return [TapeEntry(groups[key], at, decode_tape(data)) for key, entries in found for at, data in entries]

    # --- fragments: the owner --------------------------------------------------------------------
    async def acquire_lease(self, fragment: int, nonce: str, ttl_s: float) -> bool:
        """Take or prolong the lease."""
        return await self._claim(self.keys.lease(fragment), nonce, ttl_s)

    async def release_lease(self, fragment: int, nonce: str) -> None:
        """Give the lease back."""
        await self._turn()
        if self._bytes(self.keys.lease(fragment)) == nonce.encode():
            self.store.delete(self.keys.lease(fragment))

    async def read_leases(self, fragments: Sequence[int]) -> list[str | None]:
        """Holders of leases."""
        await self._turn()
        found = (self._bytes(self.keys.lease(p)) for p in fragments)
        return [None if holder is None else holder.decode(errors="replace") for holder in found]

    async def announce_syncer(self, nonce: str, name: str, ttl_s: float) -> tuple[str, ...]:
        """Say that a syncer is here."""
        await self._turn()
        now_ms, found = self._unix_ms(), self._hash(self.keys.syncers)
        live = {*stored.live_syncers(now_ms, found), nonce}
        for other in [other for other in found if other.decode(errors="replace") not in live]:
            del found[other]
        until_ms = now_ms + max(1, round(1000 * ttl_s))
        self.store.hset(self.keys.syncers, {nonce: f"{until_ms} {name}".encode()})
        return tuple(sorted(live))

    async def withdraw_syncer(self, nonce: str) -> None:
        """Say that a syncer is gone."""
        await self._turn()
        found = self._hash(self.keys.syncers)
        found.pop(nonce.encode(), None)
        if not found:
            self.store.delete(self.keys.syncers)

    async def read_syncers(self) -> dict[str, str]:
        """Syncers that are here."""
        await self._turn()
        return stored.live_syncers(self._unix_ms(), self._hash(self.keys.syncers))

    async def read_offers(
        self, fragment: int, after: Mapping[str, str] | None = None, block_s: float = 0.0, limit: int = 256
    ) -> list[Offered]:
        """Pending headers."""
        await self._turn()
        group = self.keys.group(fragment)

        def cursors() -> dict[str, str]:
            return stored.cursors(self._hash(self.keys.senders(group)), after)

        arrivals = self._stream(self.keys.arrivals(group))
        known = {self.keys.deltas(fragment, name): at for name, at in cursors().items()}
        await self._read(known | {self.keys.arrivals(group): "{}-{}".format(*arrivals.last)}, 1, block_s)
        return [
            stored.decode_offer(fragment, name, at, data)
            for name, cursor in cursors().items()
            for at, data in self._stream(self.keys.deltas(fragment, name)).after(stored.entry_id(cursor), limit)
        ]

    def _owner_checks(self, p: int, nonce: str, *streams: str) -> Hash:
        """Types first, then the lease; returns the head."""
        self._bytes(self.keys.lease(p))
        head = self._hash(self.keys.head(p))
        for key in (self.keys.tape(self.keys.group(p)), *streams):
            self._stream(key)
        self._owned(self.keys.lease(p), nonce)
        return head

    def _expect(self, p: int, head: Hash, expected: tuple[int, bytes] | None) -> None:
        now = (stored.decode_count("version", head.get(b"version")), head.get(b"digest", b"")) if head else None
        if now != expected:
            raise HeadMoved(f"the head of fragment {p} is at {now and now[0]}")

    def _add(self, head: Hash, totals: Mapping[str, int]) -> dict[str, bytes]:
        sums = {name: stored.decode_count(name, head.get(name.encode())) + more for name, more in totals.items()}
        if max(sums.values()) >= stored.COUNTER_LIMIT:
            raise BadMessage("a total of the head is out of bounds")
        return {name: b"%d" % total for name, total in sums.items()}

    def _room(self, head: Hash, lost_tokens: int) -> int:
        """A refusal is never refused for what a peer says that it lost."""
        have = stored.decode_count("rejected_tokens", head.get(b"rejected_tokens"))
        return lost_tokens if have + lost_tokens < stored.COUNTER_LIMIT else 0

    def _headers(self, p: int, entries: Iterable[str]) -> dict[str, list[EntryId]]:
        """Streams and the entries named of each."""
        found = stored.by_learner(entries)
        return {self.keys.deltas(p, learner): list(map(stored.entry_id, ids)) for learner, ids in found.items()}

    def _delete(self, headers: Mapping[str, list[EntryId]], keys: Iterable[str]) -> None:
        for deltas, entries in headers.items():
            stream = self._stream(deltas)
            for at in entries:
                stream.delete(at)
        for key in keys:
            self.store.delete(key)

    async def commit(self, commit: Commit) -> None:
        """Move the head."""
        p = stored.fragment_of(commit)
        keys = self.keys
        staged = commit.staged
        headers = self._headers(p, commit.entries)
        gone = (*commit.delta_payloads, *commit.retired)
        stored.one_slot((keys.head(p), *(s.key for s in staged), *gone))
        await self._turn()
        head = self._owner_checks(p, commit.nonce, *headers, *(s.key for s in staged))
        self._expect(p, head, commit.expected)
        replaced, old_momentum = self._replaced(head, commit)
        totals = {"merged_deltas": len(commit.record.contributions), "merged_tokens": commit.merged_tokens}
        lost = {name.encode(): total for name, total in stored.lost_totals(commit).items()}
        sums = self._add({**head, **lost}, {**totals, "rejected_tokens": 0})
        self._keep(staged)
        self.store.hset(keys.head(p), {**stored.head_fields(commit), **sums})
        self._xadd(keys.tape(keys.group(p)), encode(commit.record))
        for old in replaced:
            self._expire(old, commit.replaced_ttl_s)
        self._delete(headers, (*gone, old_momentum))

    def _replaced(self, head: Hash, of: Commit | Republication) -> tuple[list[str], str]:
        return stored.replaced_by(of, [head.get(name.encode(), b"") for name in stored.NAMED])

    def _keep(self, staged: Iterable[Staged]) -> None:
        """Make payloads stay that are whole, all of them or none."""
        for s in staged:
            if (have := len(self._stream(s.key).ids)) != s.chunks:
                raise PayloadIncomplete(f"{s.key} has {have} of {s.chunks} chunks")
        for s in staged:
            self.store.expiries.pop(s.key, None)

    async def republish(self, fragment: int, anew: Republication) -> None:
        """Name other payloads of the same version."""
        key, staged = self.keys.head(fragment), anew.staged
        stored.one_slot((key, *(s.key for s in staged)))
        await self._turn()
        head = self._owner_checks(fragment, anew.nonce, *(s.key for s in staged))
        self._expect(fragment, head, anew.expected)
        replaced, old_momentum = self._replaced(head, anew)
        self._keep(staged)
        self.store.hset(key, stored.payload_fields(anew))
        for old in replaced:
            self._expire(old, anew.replaced_ttl_s)
        self._delete({}, (old_momentum,))

    async def refuse(self, fragment: int, refusal: Refusal) -> None:
        """Refuse deltas."""
        keys = self.keys
        headers = self._headers(fragment, refusal.entries)
        stored.one_slot((keys.head(fragment), *refusal.delta_payloads))
        await self._turn()
        head = self._owner_checks(fragment, refusal.nonce, *headers)
        self._expect(fragment, head, refusal.expected)
        counts = {stored.refused_field(reason): n for reason, n in refusal.counts().items()}
        sums = self._add(head, {"rejected_tokens": self._room(head, refusal.lost_tokens), **counts})
        if headers and not any(at in self._stream(key).ids for key, entries in headers.items() for at in entries):
            return  # refused before; counted and recorded then
        self._delete(headers, refusal.delta_payloads)
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
        """Publish the window."""
        await self._turn()
        self._expect(fragment, self._owner_checks(fragment, nonce), expected)
        self.store.hset(self.keys.head(fragment), {"window": encode(window)})
        if record is not None:
            self._xadd(self.keys.tape(self.keys.group(fragment)), encode(record))

    async def trim_tape(self, group: int, before: str) -> None:
        """Drop old tape entries."""
        await self._turn()
        tape, limit = self._stream(self.keys.tape(group)), stored.entry_id(before)
        for at in tape.ids[: bisect_left(tape.ids, limit)]:
            tape.delete(at)
