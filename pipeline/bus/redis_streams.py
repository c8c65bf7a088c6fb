"""The bus on Redis 6.2 or newer, one node or a cluster; what each method promises stands in `ports.Bus`.

Every step that is more than one command is a script under `lua/` (see `_prelude.lua` for their rules).
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgpack

from diloco.pipeline.bus import entry_ids, head_hash, stored_values
from diloco.pipeline.bus.commits import Commit, Refusal, Republication
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import START, Bus, BusInfo, MomentsBoard, Offered, TapeEntry
from diloco.pipeline.bus.redis_calls import RedisCalls, connect_calls, to_ms
from diloco.pipeline.errors import BusUnavailable, NotPermitted, UsageError
from diloco.pipeline.messages.delta import DeltaHeader
from diloco.pipeline.messages.head import Head, WindowView
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish
from diloco.pipeline.messages.run import Evaluation, Event, InitialUpload, LearnerReport, RunState, SeenReport
from diloco.pipeline.messages.shards import ClaimedShard, Shard, ShardQueue
from diloco.pipeline.messages.tape import Rewound, WindowChanged
from diloco.pipeline.messages.wire import Message
from diloco.pipeline.payload.chunks import ChunkParts, Encoded
from diloco.pipeline.payload.codec import decode, decode_tape, encode

T = TypeVar("T", bound=Message)


async def connect(url: str, run: str) -> "RedisBus":
    """Reach a run on a Redis server or cluster.

    Args:
        url: redis://, rediss:// (certificates are verified) or unix://.
        run: name of the run.

    Raises:
        UsageError: the URL is malformed, the login is refused, or the server is older than 6.2.
        BusUnavailable: there is no answer.
    """
    return RedisBus(await connect_calls(url), run)


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


class _Step:
    """A call of a script by named fields. A key stands in them as its place among the script's keys.

    Numbers that may be large are decimal text: Lua has no integers above 2**53.
    """

    def __init__(self, keys: list[str], nonce: str) -> None:
        self.keys = keys
        self.fields: dict[str, Any] = {"nonce": nonce}

    def place(self, key: str) -> int:
        """Name a key; its place, from 1."""
        self.keys.append(key)
        return len(self.keys)

    def places(self, keys: Iterable[str]) -> list[int]:
        """The same of several."""
        return [self.place(key) for key in keys]

    def call(self) -> tuple[list[str], bytes]:
        """Keys, and the one argument."""
        return self.keys, msgpack.packb(self.fields, use_bin_type=False)  # Lua has one type for text and bytes


class RedisBus(Bus):
    """A run on Redis; made by `connect`."""

    def __init__(self, calls: RedisCalls, run: str) -> None:
        self.keys = RunKeys(run)
        self._redis = calls

    def use_groups(self, groups: int) -> None:
        self.keys = RunKeys(self.keys.run, groups)

    async def info(self) -> BusInfo:
        return await self._redis.info()

    async def close(self) -> None:
        await self._redis.close()

    # --- the run as a whole ----------------------------------------------------------------------
    async def propose_spec(self, spec: bytes) -> bytes:
        holds = await self.read_spec()  # SETNX is refused where memory is short
        if holds is None:
            _, holds = await self._redis.many([("SETNX", self.keys.spec, spec), ("GET", self.keys.spec)])
        if holds is None:
            raise BusUnavailable("the spec vanished as it was set")
        return bytes(holds)

    async def read_spec(self) -> bytes | None:
        spec: bytes | None = await self._redis.command("GET", self.keys.spec)
        return spec

    async def replace_spec(self, spec: bytes, instead_of: bytes) -> bool:
        return await self._redis.script("replace_spec", [self.keys.spec], spec, instead_of) == [1]

    async def write_state(self, state: RunState) -> RunState:
        (blob,) = await self._redis.script("write_state", [self.keys.state], state.phase.rank, encode(state))
        return decode(RunState, blob)

    async def read_state(self) -> RunState | None:
        return stored_values.decode_state(await self._redis.command("HGET", self.keys.state, "blob"))

    async def write_report(self, report: LearnerReport) -> RunState | None:
        keys = [self.keys.learners, self.keys.seen, self.keys.state, self.keys.holder(report.learner)]
        name = f"{report.learner}/{report.incarnation}"
        holder = (report.generation, stored_values.holder(report))
        (blob,) = await self._redis.script("write_report", keys, name, encode(report), report.number, *holder)
        return stored_values.decode_state(blob)

    async def put_back_report(self, seen: SeenReport) -> None:
        name = f"{seen.report.learner}/{seen.report.incarnation}"
        keys = [self.keys.learners, self.keys.seen]
        await self._redis.script("put_back_report", keys, name, encode(seen.report), int(seen.age_s * 1000))

    async def read_reports(self) -> list[SeenReport]:
        now_ms, reports, seen = await self._redis.script("read_reports", [self.keys.learners, self.keys.seen])
        return stored_values.seen_reports(int(now_ms), _pairs(reports), _pairs(seen))

    async def _add(self, key: str, message: Message, cap: int) -> None:
        await self._redis.command("XADD", key, "MAXLEN", "~", cap, "*", "m", encode(message))

    async def _log(self, key: str, kind: type[T], after: str, limit: int) -> list[tuple[str, T]]:
        found = await self._redis.read({key: after}, limit, 0)
        return [(at, decode(kind, data)) for _, entries in found for at, data in entries]

    async def add_event(self, event: Event) -> None:
        await self._add(self.keys.events, event, stored_values.EVENTS_CAP)

    async def read_events(self, after: str = START, limit: int = 1000) -> list[tuple[str, Event]]:
        return await self._log(self.keys.events, Event, after, limit)

    async def add_evaluation(self, evaluation: Evaluation) -> None:
        await self._add(self.keys.evaluations, evaluation, stored_values.EVALUATIONS_CAP)

    async def read_evaluations(self, after: str = START, limit: int = 1000) -> list[tuple[str, Evaluation]]:
        return await self._log(self.keys.evaluations, Evaluation, after, limit)

    # --- version 0 -------------------------------------------------------------------------------
    async def claim_initial(self, nonce: str, ttl_s: float) -> bool:
        return await self._redis.script("claim", [self.keys.init_claim], nonce, to_ms(ttl_s)) == [1]

    async def finish_initial(self, upload: InitialUpload, ttl_s: float) -> bool:
        keys = [self.keys.init_claim, self.keys.initial]
        return await self._redis.script("announce", keys, upload.nonce, encode(upload), to_ms(ttl_s)) == [1]

    async def read_initial(self) -> InitialUpload | None:
        blob = await self._redis.command("GET", self.keys.initial)
        return None if blob is None else decode(InitialUpload, blob)

    # --- an inner optimizer's moments ------------------------------------------------------------
    async def ask_moments(self, wish: MomentsWish, ttl_s: float) -> None:
        await self._redis.script("ask", [self.keys.moments_wish], encode(wish), to_ms(ttl_s))

    async def read_moments(self) -> MomentsBoard:
        keys = (self.keys.moments_wish, self.keys.moments_claim, self.keys.moments_offer)
        return stored_values.moments_board(*await self._redis.many(("GET", key) for key in keys))

    async def claim_moments(self, nonce: str, ttl_s: float) -> bool:
        return await self._redis.script("claim", [self.keys.moments_claim], nonce, to_ms(ttl_s)) == [1]

    async def finish_moments(self, offer: MomentsOffer, ttl_s: float) -> bool:
        keys = [self.keys.moments_claim, self.keys.moments_offer, self.keys.moments_wish, self.keys.moments_claim]
        return await self._redis.script("announce", keys, offer.nonce, encode(offer), to_ms(ttl_s)) == [1]

    # --- payloads --------------------------------------------------------------------------------
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

    async def expire_soon(self, key: str, ttl_s: float) -> None:
        await self._redis.script("expire_soon", [key], to_ms(ttl_s))

    # --- fragments: learners ---------------------------------------------------------------------
    async def offer(self, header: DeltaHeader, renews: str = "") -> str:
        p, learner = header.fragment, header.learner
        group = self.keys.group(p)
        keys = [self.keys.deltas(p, learner), self.keys.senders(group), self.keys.arrivals(group)]
        outdone = [entry_ids.parse_offer_id(renews)[1]] if renews else []
        (at,) = await self._redis.script("offer", keys, learner, encode(header), *outdone)
        return entry_ids.offer_id(learner, at.decode())

    async def read_heads(self, fragments: Sequence[int]) -> list[Head | None]:
        found = await self._redis.hashes(self.keys.head(p) for p in fragments)
        return [head_hash.decode_head(p, fields) for p, fields in zip(fragments, found, strict=True)]

    async def tape_end(self) -> dict[int, str]:
        groups = range(self.keys.groups)
        ends = await self._redis.many(("XREVRANGE", self.keys.tape(g), "+", "-", "COUNT", 1) for g in groups)
        return {g: end[0][0].decode() if end else START for g, end in zip(groups, ends, strict=True)}

    async def read_tape(self, cursors: Mapping[int, str], block_s: float = 0.0, limit: int = 1000) -> list[TapeEntry]:
        groups = {self.keys.tape(group): group for group in cursors}
        found = await self._redis.read({key: cursors[group] for key, group in groups.items()}, limit, block_s)
        return [TapeEntry(groups[key], at, decode_tape(data)) for key, entries in found for at, data in entries]

    # --- fragments: the owner --------------------------------------------------------------------
    async def acquire_lease(self, fragment: int, nonce: str, ttl_s: float) -> bool:
        return await self._redis.script("claim", [self.keys.lease(fragment)], nonce, to_ms(ttl_s)) == [1]

    async def release_lease(self, fragment: int, nonce: str) -> None:
        await self._redis.script("release", [self.keys.lease(fragment)], nonce)

    async def read_leases(self, fragments: Sequence[int]) -> list[str | None]:
        found = await self._redis.many(("GET", self.keys.lease(p)) for p in fragments)
        return [None if holder is None else holder.decode(errors="replace") for holder in found]

    async def announce_syncer(self, nonce: str, name: str, ttl_s: float) -> tuple[str, ...]:
        (live,) = await self._redis.script("announce_syncer", [self.keys.syncers], nonce, name, to_ms(ttl_s))
        return tuple(sorted(one.decode(errors="replace") for one in live))

    async def withdraw_syncer(self, nonce: str) -> None:
        await self._redis.command("HDEL", self.keys.syncers, nonce)

    async def read_syncers(self) -> dict[str, str]:
        now_ms, found = await self._redis.script("read_syncers", [self.keys.syncers])
        return stored_values.live_syncers(int(now_ms), _pairs(found))

    async def read_offers(
        self, fragment: int, after: Mapping[str, str] | None = None, block_s: float = 0.0, limit: int = 256
    ) -> list[Offered]:
        group, now = self.keys.group(fragment), asyncio.get_running_loop().time
        senders, arrivals = self.keys.senders(group), self.keys.arrivals(group)
        until = now() + block_s
        while True:
            # The last arrival before the names: whoever comes after them is a later one, and ends the read.
            last, names = await self._redis.many([("XREVRANGE", arrivals, "+", "-", "COUNT", 1), ("HKEYS", senders)])
            streams = {
                self.keys.deltas(fragment, name): (name, at) for name, at in entry_ids.cursors(names, after).items()
            }
            cursors = {key: at for key, (_, at) in streams.items()}
            cursors[arrivals] = last[0][0].decode() if last else START
            found = dict(await self._redis.read(cursors, limit, max(0.0, until - now())))
            came = found.pop(arrivals, None)
            if found or not came or now() >= until:
                of = {streams[key][0]: entries for key, entries in found.items()}
                return [
                    stored_values.decode_offer(fragment, name, at, data) for name in sorted(of) for at, data in of[name]
                ]

    def _owned(self, p: int) -> list[str]:
        return [self.keys.lease(p), self.keys.head(p), self.keys.tape(self.keys.group(p))]

    def _step(self, p: int, nonce: str) -> "_Step":
        return _Step([self.keys.lease(p), self.keys.head(p), self.keys.tape(self.keys.group(p))], nonce)

    def _headers(self, step: "_Step", p: int, entries: Iterable[str]) -> None:
        """Headers that go, by learner's stream."""
        found = entry_ids.by_learner(entries).items()
        step.fields["headers"] = [
            {"key": step.place(self.keys.deltas(p, learner)), "entries": ids} for learner, ids in found
        ]

    async def _name_payloads(self, step: "_Step", p: int, of: Commit | Republication, retired: Iterable[str]) -> None:
        """What the head will name, and what it names no more.

        A script may only touch keys named beforehand, so what it replaces is looked up first. The script checks that
        the head still names the same.
        """
        found = await self._redis.command("HMGET", self.keys.head(p), *head_hash.NAMED)
        named = [value or b"" for value in found]
        replaced, old_momentum = head_hash.replaced_by(of, named)
        version, digest = of.expected or ("", b"")
        step.fields |= {
            "was": {"version": str(version), "digest": digest, **dict(zip(head_hash.NAMED, named, strict=True))},
            "staged": [{"key": step.place(one.key), "chunks": one.chunks} for one in of.staged],
            "replaced": step.places(replaced),
            "replaced_ttl_ms": to_ms(of.replaced_ttl_s),
            "gone": step.places([*retired, *([old_momentum] if old_momentum else [])]),
        }

    async def commit(self, commit: Commit) -> None:
        p = head_hash.fragment_of(commit)
        step = self._step(p, commit.nonce)
        self._headers(step, p, commit.entries)
        await self._name_payloads(step, p, commit, [*commit.delta_payloads, *commit.retired])
        step.fields |= {
            "set": [part for pair in head_hash.head_fields(commit).items() for part in pair],
            "merged_deltas": str(len(commit.record.contributions)),
            "merged_tokens": str(commit.merged_tokens),
            "record": encode(commit.record),
        }
        await self._redis.script("commit", *step.call())

    async def republish(self, fragment: int, anew: Republication) -> None:
        step = self._step(fragment, anew.nonce)
        await self._name_payloads(step, fragment, anew, ())
        step.fields["set"] = [part for pair in head_hash.payload_fields(anew).items() for part in pair]
        await self._redis.script("republish", *step.call())

    async def refuse(self, fragment: int, refusal: Refusal) -> None:
        step = self._step(fragment, refusal.nonce)
        self._headers(step, fragment, refusal.entries)
        version, digest = refusal.expected
        step.fields |= {
            "was": {"version": str(version), "digest": digest},
            "lost_tokens": str(refusal.lost_tokens),
            "counts": [
                {"field": head_hash.refused_field(reason), "more": str(n)} for reason, n in refusal.counts().items()
            ],
            "gone": step.places(refusal.delta_payloads),
            "records": [encode(record) for record in refusal.records],
        }
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
        await self._redis.script("write_window", self._step(fragment, nonce).keys, *args)

    async def trim_tape(self, group: int, before: str) -> None:
        entry_ids.entry_id(before)
        await self._redis.command("XTRIM", self.keys.tape(group), "MINID", "=", before)

    # --- data shards -----------------------------------------------------------------------------
    @property
    def _queue(self) -> list[str]:
        return [self.keys.shards, self.keys.shard_positions, self.keys.shard_epoch]

    async def _put_shards(self, before: int, after: int, empty: bool, shards: Iterable[tuple[Shard, int]]) -> bool:
        pairs = (part for shard, position in shards for part in (encode(shard), position))
        return await self._redis.script("put_shards", self._queue, before, after, int(empty), *pairs) == [1]

    async def fill_shards(self, epoch: int, shards: Sequence[Shard], counted: int | None = None) -> bool:
        before = epoch if counted is None else counted
        return await self._put_shards(before, epoch + 1, False, ((shard, 0) for shard in shards))

    async def count_epochs(self) -> int:
        return stored_values.decode_count("shard epoch", await self._redis.command("GET", self.keys.shard_epoch))

    async def claim_shard(self, consumer: str, silent_s: float, known: Collection[str] = ()) -> ClaimedShard | None:
        for entry_id in known:
            entry_ids.entry_id(entry_id)
        keys = [*self._queue[:2], self.keys.seen]
        found = await self._redis.script("claim_shard", keys, consumer, to_ms(silent_s), *known)
        if not found:
            return None
        at, blob, position = found
        position = stored_values.decode_count("shard position", position)
        return ClaimedShard(entry_id=at.decode(), shard=stored_values.decode_shard(blob), position=position)

    async def save_position(self, consumer: str, entry_id: str, position: int) -> None:
        entry_ids.entry_id(entry_id)
        await self._redis.script("save_position", self._queue[:2], consumer, entry_id, position)

    async def finish_shard(self, consumer: str, entry_id: str) -> None:
        entry_ids.entry_id(entry_id)
        await self._redis.script("finish_shard", self._queue[:2], consumer, entry_id)

    async def release_shards(self, consumer: str) -> None:
        await self._redis.script("release_shards", self._queue[:1], consumer)

    async def read_shards(self) -> ShardQueue:
        epochs, entries, positions = await self._redis.script("read_shards", self._queue)
        found = ((at.decode(), fields[1]) for at, fields in entries)
        return stored_values.shard_queue(stored_values.decode_count("shard epoch", epochs), found, _pairs(positions))

    async def restore_shards(self, queue: ShardQueue) -> None:
        if not await self._put_shards(0, queue.epochs, True, queue.open):
            raise UsageError(f"run {self.keys.run!r} already has data shards: resume on an empty Redis or a new --run")
