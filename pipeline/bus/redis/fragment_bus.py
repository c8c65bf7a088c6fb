"""The fragments on Redis: headers, payloads, heads, tapes, leases, and owner's writes.

Each owner's write is one script, which checks the lease and the head before it changes anything.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any

import msgpack
import redis.exceptions as rx
import structlog

from diloco.pipeline.bus import schema
from diloco.pipeline.bus.commits import MAX_HEADERS, Commit, Refusal, Republication
from diloco.pipeline.bus.ports import (
    START,
    FragmentLeases,
    Heads,
    Offered,
    Offers,
    OwnerWrites,
    PayloadStore,
    Tape,
    TapeEntry,
)
from diloco.pipeline.bus.redis import zero_copy
from diloco.pipeline.bus.redis.calls import RedisCalls, key_of, script, to_ms
from diloco.pipeline.bus.redis.connection import RedisConnection, held
from diloco.pipeline.bus.redis.redis_errors import THERE
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BadMessage, BusUnavailable, NotPermitted, Oversized, ScriptsMissing
from diloco.pipeline.messages.fragment import DeltaHeader, Head, Rewound, WindowChanged, WindowView
from diloco.pipeline.messages.wire import MAX_LEASE_S, MAX_NAME_CHARS
from diloco.pipeline.payload.codec import ChunkParts, Encoded, encode

# Keys that one call of a script names at most.
AT_ONCE = 2048
# Upper bound on a reply with the names of as many learners as a run may have.
SENDERS_BYTES = 2**20
SENDERS_DROPPED = (
    "the list of learners that offer deltas had this many names that are not learners' names or have no pending "
    "delta. They were removed from the list until they offer one. This happens in a run of more than 512 learners "
    "when a fragment gets a different owner, and nothing is lost. If the run never had that many learners, someone "
    "with a learner's password is inventing names: stop this with ACL DELUSER learner-NAME"
)
SKIPPED = (
    "no party of this build can have written it, so it is in no archive, report or page. If it stands in place of a "
    "merge or a refusal, its tokens are a gap in the ledger. Merging continues. To delete it: XDEL '%s' %s"
)


class RedisFragments(RedisConnection, PayloadStore, Heads, Tape, Offers, FragmentLeases):
    """The fragments without the owner's writes. All keys are in `RunKeys`, all formats in `schema`."""

    def __init__(self, calls: RedisCalls, run: str) -> None:
        super().__init__(calls, run)
        self._dropping = asyncio.Lock()
        # Group -> names that had a header pending when `_with_headers` last checked them; they count as known.
        self._senders: dict[int, set[bytes]] = {}
        self._skipped: set[tuple[str, str]] = set()
        """(key, entry id) of the unreadable entries of tapes that were logged. Only syncers and operators add any."""
        # Batches of lease calls: (group, nonce, ttl, most) -> lease key -> the futures of its callers.
        self._asked: dict[tuple[int, str, float, float], dict[str, list[asyncio.Future[Any]]]] = {}

    # Headers: a stream for each fragment and learner, the set of names that have one, and the group's arrivals.

    async def offer(self, header: DeltaHeader, renews: str = "") -> str:
        p, learner = header.fragment, header.learner
        group = self.keys.group(p)
        keys = [self.keys.deltas(p, learner), self.keys.senders(group), self.keys.arrivals(group)]
        outdone = [schema.parse_offer_id(renews)[1]] if renews else []
        data = encode(header)
        (at,) = await self._redis.script("offer", keys, learner, data, *outdone)
        return schema.offer_id(learner, at.decode(), data)

    async def read_offers(
        self, fragment: int, after: Mapping[str, str] | None = None, block_s: float = 0.0, limit: int = 256
    ) -> list[Offered]:
        group, now = self.keys.group(fragment), asyncio.get_running_loop().time
        arrivals, until = self.keys.arrivals(group), now() + block_s
        while True:
            last, names = await self._senders_now(group, block_s > 0)
            if self._too_many(group, names, after):
                names = await self._with_headers(group, after)
            streams = {
                self.keys.deltas(fragment, name): (name, at) for name, at in schema.offer_cursors(names, after).items()
            }
            cursors = {key: at for key, (_, at) in streams.items()}
            if last is not None:
                cursors[arrivals] = last
            if not cursors:
                return []
            left_s = max(0.0, until - now())
            found = dict(await self._redis.read(cursors, limit, left_s, value_bytes=DeltaHeader.max_bytes))
            came = found.pop(arrivals, None)
            if found or not came or now() >= until:
                of = {streams[key][0]: entries for key, entries in found.items()}
                return [schema.decode_offer(fragment, name, at, data) for name in sorted(of) for at, data in of[name]]

    async def _senders_now(self, group: int, waits: bool) -> tuple[str | None, list[bytes]]:
        """Return the cursor after the last arrival (None unless the caller waits), and the names of a group's senders.

        If this user has the rights, names that cannot be a learner's are deleted, and so are the arrivals when the
        reply is larger than the names of all learners can be.
        """
        senders, arrivals, gone = self.keys.senders(group), self.keys.arrivals(group), 0
        # Read the cursor before the names. A learner that is added between the two then has an arrival after the
        # cursor, which ends the blocking read; in the other order its first header would be missed until the timeout.
        commands = [("XREVRANGE", arrivals, "+", "-", "COUNT", 1)] if waits else []
        try:
            *last, names = await self._redis.at_one_node([*commands, ("HKEYS", senders)], senders, SENDERS_BYTES)
        except Oversized:
            if waits:
                with suppress(NotPermitted):
                    await self._redis.command("XTRIM", arrivals, "MAXLEN", 0)
            (names, gone), last = await self._redis.scan_hash(senders, MAX_NAME_CHARS, 0), [()]
        listed = [name for name in names if schema.is_learner(name)]
        with suppress(NotPermitted):
            gone += await self._redis.delete(senders, set(names).difference(listed))
        if gone:
            self._warn("senders_dropped", names=gone, detail=SENDERS_DROPPED)
        return (last[0][0][0].decode() if last[0] else START) if waits else None, listed

    def _too_many(self, group: int, names: Collection[bytes], after: Mapping[str, str] | None) -> set[bytes]:
        """Return the unknown names if there are too many, otherwise an empty set.

        The set is also empty before the spec is known, since a name's streams cannot be listed without it.
        """
        return schema.new_senders(names, after, self._senders.get(group, ())) if self._fragments else set()

    async def _with_headers(self, group: int, after: Mapping[str, str] | None) -> list[bytes]:
        """Return a group's senders without new names that have no header pending; delete those if this user may.

        Any learner may add any name, but only append to a stream of its own. The cost of each read grows with the
        number of names, so a flood of names would otherwise stop all merges.
        """
        key = self.keys.senders(group)
        fragments = [p for p in range(self._fragments) if self.keys.group(p) == group]
        async with self._dropping:  # all fragments' readers get here at once: the first cleans up for the others
            _, names = await self._senders_now(group, waits=False)
            asked, idle, gone = list(self._too_many(group, names, after)), set[bytes](), 0
            step = max(1, AT_ONCE // len(fragments))
            for i in range(0, len(asked), step):
                some = asked[i : i + step]
                streams = [self.keys.deltas(p, name.decode()) for name in some for p in fragments]
                try:
                    found, removed = await self._redis.script("drop_senders", [key, *streams], *some)
                except ScriptsMissing:  # a viewer may not load scripts: it reads all names, which takes longer
                    return names
                idle |= set(found)
                gone += removed
            self._senders[group] = self._senders.get(group, set()).union(asked) - idle
        if gone:
            self._warn("senders_dropped", names=gone, detail=SENDERS_DROPPED)
        return [name for name in names if name not in idle]

    # Payloads: the chunk of index `i` (from 0) is the stream entry `{i+1}-0`. Writes use the bulk lane, reads the
    # payloads lane.

    async def write_chunks(self, key: str, first: int, chunks: Sequence[Encoded], ttl_s: float) -> None:
        schema.check_chunks(first, chunks)
        sha, ms = script("write_chunk").sha, to_ms(ttl_s)
        calls = [("EVALSHA", sha, 1, key, i, ms, chunk) for i, chunk in enumerate(chunks, first)]
        if len(chunks) <= 2 or not isinstance(chunks[0], ChunkParts):
            await self._write(calls)
            return
        # Redis copies a script's arguments three times, which costs the server twice as much as the chunk itself. So
        # only the first and the last chunk go through the script: the first checks that the chunks before it exist, the
        # last that all between exist. Those between are plain XADDs with explicit ids, which are idempotent: an id that
        # exists is refused (ignored in `_write`), and NOMKSTREAM does not recreate a payload that has expired.
        between = [
            ("XADD", key, "NOMKSTREAM", f"{i + 1}-0", "c", chunk) for i, chunk in enumerate(chunks[1:-1], first + 1)
        ]
        if first > 0:
            await self._write(calls[:1])
            await self._write([*between, calls[-1]])
        else:  # no chunk can be missing before index 0: one round trip is enough
            await self._write([calls[0], *between, calls[-1]])

    async def _write(self, commands: Sequence[Sequence[Any]]) -> None:
        """Send calls of `write_chunk` and plain XADDs in one round trip; an entry that already exists is kept."""
        send = partial(self._redis.send, commands, key_of(commands[0]), "bulk", BUS_TIMES.payload_call_s)
        replies = await send()
        if any(isinstance(reply, rx.NoScriptError) for reply in replies):
            await self._redis.ensure_scripts()
            replies = await send()
        for command, reply in zip(commands, replies, strict=True):
            failed = isinstance(reply, Exception) and not THERE.search(str(reply))
            if command[0] == "EVALSHA" or failed:
                self._redis.answer(reply, command[3] if command[0] == "EVALSHA" else command[1])

    async def count_chunks(self, key: str) -> int:
        return int(await self._redis.command("XLEN", key))

    async def read_chunks(
        self, key: str, first: int, limit: int, chunk_bytes: int, block_s: float = 0.0, extend_s: float = 0.0
    ) -> list[bytes | memoryview]:
        if extend_s > 0:
            with suppress(NotPermitted):  # a read-only user cannot extend it: if it expires, the pull starts over
                await self._redis.script("extend", [key], to_ms(extend_s))
        cursors = {key: f"{first}-0"}
        command, lane = self._redis.xread(cursors, limit, block_s, "payloads")
        try:
            async with self._redis.call(lane, BUS_TIMES.payload_call_s + block_s, key) as client:
                # The values are views of one buffer; they keep it alive, and nothing writes to it any more.
                key_then_entries = await zero_copy.receive(client, command, *zero_copy.of_chunks(limit, chunk_bytes))
        except Oversized as error:
            raise schema.chunks_too_large(key, chunk_bytes) from error
        return list(key_then_entries[3::3])  # id, field, value

    async def expire_soon(self, key: str, ttl_s: float) -> None:
        await self._redis.script("expire_soon", [key], to_ms(ttl_s))

    async def read_heads(self, fragments: Sequence[int]) -> list[Head | None]:
        found = await self._redis.hashes(self.keys.head(p) for p in fragments)
        return [self._decoded(p, fields) for p, fields in zip(fragments, found, strict=True)]

    def _decoded(self, fragment: int, fields: Mapping[bytes, bytes]) -> Head | None:
        try:
            return schema.decode_head(fragment, fields)
        except BadMessage as error:
            raise BadMessage(error.found, schema.unlink(self.keys.head(fragment)), error.said) from error

    async def tape_end(self) -> dict[int, str]:
        groups = range(self.keys.groups)
        asked = [("XREVRANGE", self.keys.tape(g), "+", "-", "COUNT", 1) for g in groups]
        ends = await self._redis.run_pipeline(asked, but_for=BusUnavailable)
        return {
            g: end[0][0].decode() if end else START
            for g, end in zip(groups, ends, strict=True)
            if not isinstance(end, BusUnavailable)
        }

    async def read_tape(
        self, cursors: Mapping[int, str], block_s: float = 0.0, limit: int = 1000, away: set[int] | None = None
    ) -> list[TapeEntry]:
        groups, now = {self.keys.tape(group): group for group in cursors}, asyncio.get_running_loop().time
        after, until = {key: cursors[group] for key, group in groups.items()}, now() + block_s
        silent: set[str] | None = None if away is None else set()
        while True:
            found = await self._redis.read(after, limit, max(0.0, until - now()), away=silent)
            if away is not None and silent:
                away |= {groups[key] for key in silent}
            entries = [one for key, stored in found for one in self._readable(key, groups[key], stored)]
            if entries or not found:
                return entries
            after |= {key: stored[-1][0] for key, stored in found}

    def _readable(self, key: str, group: int, stored: Sequence[tuple[str, bytes]]) -> list[TapeEntry]:
        """Decode a tape's entries; log each unreadable one once, and skip it."""
        entries, errors = schema.decode_entries(group, stored)
        for at, error in errors.items():
            if (key, at) not in self._skipped:
                self._skipped.add((key, at))
                structlog.get_logger().warning(
                    "tape_entry_skipped", key=key, entry=at, error=str(error), detail=SKIPPED % (key, at)
                )
        return entries

    async def trim_tape(self, group: int, before: str) -> None:
        schema.entry_id(before)
        await self._redis.command("XTRIM", self.keys.tape(group), "MINID", "=", before)

    # Leases: expiring strings whose value is the owner's nonce.

    async def acquire_lease(self, fragment: int, nonce: str, ttl_s: float, max_s: float = MAX_LEASE_S) -> bool:
        # Requests made in the same iteration of the event loop go in one call. The first caller leads the batch: it
        # sends the call and resolves the others' futures. With a call for each lease, a busy syncer with many leases
        # would lose some while their calls wait for a turn.
        at, key = (self.keys.group(fragment), nonce, ttl_s, max_s), self.keys.lease(fragment)
        leads = at not in self._asked
        asked = self._asked.setdefault(at, {})
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        asked.setdefault(key, []).append(answer)
        if leads:
            answers: list[Any] = []
            try:
                try:
                    await asyncio.sleep(0)  # lets the other callers of this iteration join the batch
                finally:
                    del self._asked[at]
                answers = await self._claim_all(list(asked), nonce, ttl_s, max_s)
            finally:
                # Runs even if the leader fails or is cancelled: then `answers` is empty, and the others get None.
                for callers, found in zip_longest(asked.values(), answers):
                    for one in callers:
                        if not one.cancelled():
                            one.set_result(found)
        found = await answer
        if found is None:
            raise BusUnavailable(f"{key}: no answer")
        return held(found)

    async def release_lease(self, fragment: int, nonce: str) -> None:
        await self._redis.script("release", [self.keys.lease(fragment)], nonce)

    async def read_leases(self, fragments: Sequence[int]) -> list[str | None]:
        found = await self._redis.run_pipeline(("GET", self.keys.lease(p)) for p in fragments)
        return [None if holder is None else holder.decode(errors="replace") for holder in found]


class _Step:
    """A call of a script with named fields. A field refers to a key by its index among the script's keys.

    Numbers that may be large are sent as decimal text, since Lua has no integers above 2**53.
    """

    def __init__(self, keys: list[str], nonce: str) -> None:
        self.keys = keys
        self.fields: dict[str, Any] = {"nonce": nonce}

    def place(self, key: str) -> int:
        """Add a key; return its index, from 1."""
        self.keys.append(key)
        return len(self.keys)

    def places(self, keys: Iterable[str]) -> list[int]:
        """Add several keys; return their indices."""
        return [self.place(key) for key in keys]

    def call(self) -> tuple[list[str], bytes]:
        """Return the script's keys and its single argument."""
        return self.keys, msgpack.packb(self.fields, use_bin_type=False)  # Lua has one type for text and bytes


class RedisOwnerWrites(RedisConnection, OwnerWrites):
    """Owner's writes as scripts on a fragment's lease, head, tape, headers and payloads."""

    def _owned(self, p: int) -> list[str]:
        return [self.keys.lease(p), self.keys.head(p), self.keys.tape(self.keys.group(p))]

    def _headers(self, step: _Step, p: int, entries: Iterable[str]) -> None:
        """Add the headers to delete, grouped by learner's stream."""
        step.fields["headers"] = [
            {
                "key": step.place(self.keys.deltas(p, learner)),
                "entries": [{"at": at, "mark": mark} for at, mark in found],
            }
            for learner, found in schema.by_learner(entries).items()
        ]

    async def _name_payloads(self, step: _Step, p: int, of: Commit | Republication, retired: Iterable[str]) -> None:
        """Add the payloads that the head will name, and those that it will no longer name.

        A script may only touch keys that its call names, so the head's current payloads must be read first. Another
        owner may change the head between this read and the script; the script therefore gets the values that were read
        (`was`) and refuses if the head differs.
        """
        found = await self._redis.command("HMGET", self.keys.head(p), *schema.NAMED)
        named = [value or b"" for value in found]
        replaced, old_momentum = schema.replaced_by(of.published, named)
        version, digest = of.expected or ("", b"")
        step.fields |= {
            "was": {"version": str(version), "digest": digest, **dict(zip(schema.NAMED, named, strict=True))},
            "staged": [{"key": step.place(one.key), "chunks": one.chunks} for one in of.published.payloads],
            "replaced": step.places(replaced),
            "replaced_ttl_ms": to_ms(of.replaced_ttl_s),
            "gone": step.places([*retired, *([old_momentum] if old_momentum else [])]),
        }

    async def commit(self, commit: Commit) -> None:
        p = schema.fragment_of(commit)
        step = _Step(self._owned(p), commit.nonce)
        self._headers(step, p, commit.entries)
        await self._name_payloads(step, p, commit, [*commit.delta_payloads, *commit.retired])
        step.fields |= {
            "set": [part for pair in schema.head_fields(commit).items() for part in pair],
            "merged_deltas": str(len(commit.record.contributions)),
            "merged_tokens": str(commit.merged_tokens),
            "record": encode(commit.record),
        }
        await self._redis.script("commit", *step.call())

    async def republish(self, fragment: int, anew: Republication) -> None:
        step = _Step(self._owned(fragment), anew.nonce)
        await self._name_payloads(step, fragment, anew, ())
        step.fields["set"] = [part for pair in schema.payload_fields(anew.published).items() for part in pair]
        await self._redis.script("republish", *step.call())

    async def refuse(self, fragment: int, refusal: Refusal) -> None:
        step = _Step(self._owned(fragment), refusal.nonce)
        self._headers(step, fragment, refusal.entries)
        version, digest = refusal.expected
        step.fields |= {
            "was": {"version": str(version), "digest": digest},
            "lost_tokens": str(refusal.lost_tokens),
            "counts": [
                {"field": schema.refused_field(reason), "more": str(n)} for reason, n in refusal.counts().items()
            ],
            "gone": step.places(refusal.delta_payloads),
            "records": [encode(record) for record in refusal.records],
        }
        if refusal.cut:
            (field,) = map(schema.refused_field, refusal.counts())
            key = step.place(self.keys.deltas(fragment, refusal.cut))
            step.fields["cut"] = {"key": key, "keep": MAX_HEADERS, "field": field}
        await self._redis.script("refuse", *step.call())

    async def write_window(
        self,
        fragment: int,
        nonce: str,
        expected: tuple[int, bytes],
        window: WindowView,
        record: WindowChanged | Rewound | None,
    ) -> None:
        args = (nonce, *expected, encode(window), encode(record) if record else "")
        await self._redis.script("write_window", self._owned(fragment), *args)
