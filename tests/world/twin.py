"""The bus in memory must not be a kinder twin: what it did in a world is done again on a real Redis, call by call.

Every call of a recorded world is made on a `RedisBus`, one after the other in the order in which they took effect,
and must have the same outcome: the same result, or the same exception. In the end both servers must hold the same.
Entry ids differ (they are times) and are matched in the order in which they were made known. Nothing expires by
itself here: times to live are LONGER, and what expired in memory is deleted where it did. What depends on the
server's clock is set just before the call, to what memory saw (`Times`).

A failover is a server that holds, of each hash tag, what was dumped at that part's own snapshot. Its clock is this
machine's: ids that memory gave twice, since its next server's clock was behind, are two on Redis. What memory does with
such ids is held against a real Redis by the contract tests. Calls on a server that was cut off are not repeated.
"""

import dataclasses
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.pipeline.bus.keys import PREFIX
from diloco.pipeline.bus.ports import START, TapeEntry
from diloco.pipeline.bus.redis.calls import RedisCalls, pairs
from diloco.pipeline.bus.redis.connecting import connect_calls
from diloco.pipeline.bus.redis_streams import RedisBus
from diloco.pipeline.bus.schema import entry_id, parse_offer_id
from diloco_studies.virtual.memory_store import EntryId, Stream
from tests import samples
from tests.world.plan import plan
from tests.world.record import (
    STAMPED,
    Called,
    Event,
    Expired,
    FailedOver,
    Full,
    Recorder,
    Restarted,
    Snapshot,
    Times,
    WorldStore,
    part_of,
    split_stamp,
)
from tests.world.world import MERGES, RUN, Result, run_seed

LONGER = 1000
"""Virtual seconds pass in no time and real ones while calls are made: all spans are multiplied, so that only the
order of two spans matters, not what a call takes."""
SPANS = ("ttl_s", "extend_s", "silent_s")
"""Arguments that are times to live, or are compared with an age."""

NOWHERE = "1-1"
"""An entry id that no entry has."""

Ids = list[tuple[str, str]]
"""(Stream, entry id)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the two servers part."""

    seed: int
    index: int
    """Of the event among the recorded ones."""
    what: str
    memory: str
    redis: str

    def __str__(self) -> str:
        return (
            f"seed {self.seed}, event {self.index}: {self.what}\n  memory: {self.memory}\n  Redis:  {self.redis}\n"
            f"  repeat it: python -m tests.world twin {self.seed}"
        )


class _Unequal(Exception):  # ends a replay; never leaves this file
    def __init__(self, memory: object, redis: object, what: str = "") -> None:
        super().__init__(what)
        self.memory, self.redis, self.what = memory, redis, what


class _Entries:
    """Entry ids of one stream on both servers."""

    def __init__(self) -> None:
        self._redis: dict[EntryId, EntryId] = {}
        self._memory: dict[EntryId, EntryId] = {}
        self._order: list[EntryId] = []
        self._before: dict[EntryId, EntryId] = {}
        """Those known before a loss: some are there still, and others never again."""
        self._lost = False

    def lose(self) -> None:
        """Memory may give the ids of lost entries to others: what is there is made known anew."""
        self._before |= self._redis
        self._lost = True
        self._redis, self._memory, self._order = {}, {}, []

    def match(self, memory: str, redis: str) -> None:
        """An entry was told by both.

        Raises:
            _Unequal: it is not the same entry.
        """
        if START in (memory, redis) and memory != redis:
            raise _Unequal(memory, redis)
        mine, theirs = entry_id(memory), entry_id(redis)
        if mine not in self._redis and theirs not in self._memory:
            self._redis[mine], self._memory[theirs] = theirs, mine
            insort(self._order, mine)
        if self._redis.get(mine) != theirs:
            raise _Unequal(memory, f"{redis}, which is another entry")

    def redis(self, memory: str) -> str:
        """The entry's id on Redis.

        Raises:
            _Unequal: no call told of such an entry.
        """
        if memory == START:
            return START
        found = self._redis.get(entry_id(memory)) or self._before.get(entry_id(memory))
        if found is None and self._lost:
            return NOWHERE  # a server that was cut off told of it
        if found is None:
            raise _Unequal(memory, "no entry that a call told of")
        return "{}-{}".format(*found)

    def from_here(self, memory: str) -> str:
        """An id on Redis that divides the known entries as an id, of an entry or not, does in memory."""
        at = bisect_left(self._order, entry_id(memory))
        if not at:  # there may be older ones that no call has told of
            return START
        if at < len(self._order):
            return "{}-{}".format(*self._redis[self._order[at]])
        ms, number = self._redis[self._order[-1]]
        return f"{ms}-{number + 1}"


def _last(entries: Sequence[TapeEntry], counts: Mapping[int, int]) -> list[TapeEntry]:
    """So many of each group: before them may be some that no call has told of."""
    left, found = Counter(counts), list[TapeEntry]()
    for entry in reversed(entries):
        if left[entry.group] > 0:
            left[entry.group] -= 1
            found.append(entry)
    return found[::-1]


class Replay:
    """A Redis on which a recorded history is repeated."""

    def __init__(self, redis: RedisCalls, groups: int) -> None:
        self._redis = redis
        self.bus = RedisBus(redis, RUN)
        self.bus.use_spec(samples.spec(groups=groups))
        self._keys = self.bus.keys
        self._entries: defaultdict[str, _Entries] = defaultdict(_Entries)
        self._snapshots: dict[int, list[tuple[bytes, int, bytes]]] = {}
        self._full: bool | None = None  # as it was found

    # --- the server ---------------------------------------------------------------------------------

    async def clear(self) -> None:
        """No key of the run, and memory for writes."""
        await self._set_full(False)
        await self._redis.run_pipeline(("UNLINK", key) for key in await self._all_keys())

    async def _all_keys(self) -> list[bytes]:
        found: list[bytes] = await self._redis.command("KEYS", f"{PREFIX}{{{RUN}*")
        return sorted(found)

    async def _set_full(self, full: bool) -> None:
        if self._full is full:
            return
        self._full = full
        await self._redis.command("CONFIG", "SET", "maxmemory", 1 if full else 0)

    async def _save(self, number: int) -> None:
        keys = await self._all_keys()
        left = await self._redis.run_pipeline(("PTTL", key) for key in keys)
        dumps = await self._redis.run_pipeline(("DUMP", key) for key in keys)
        self._snapshots[number] = [(k, max(0, ms), d) for k, ms, d in zip(keys, left, dumps, strict=True)]

    async def _restart(self, snapshot: int | None) -> None:
        """A new server knows no scripts; it loads what it has, whether there is room or not."""
        await self._redis.command("SCRIPT", "FLUSH")
        if snapshot is not None:
            full = bool(self._full)
            await self.clear()
            await self._redis.run_pipeline(("RESTORE", *key) for key in self._snapshots[snapshot])
            await self._set_full(full)
            self._lose()

    async def _fail_over(self, parts: Mapping[str, int]) -> None:
        """Another server, which has of each part what it had at a snapshot."""
        await self._restart(None)
        full = bool(self._full)
        await self.clear()
        for part, number in sorted(parts.items()):
            kept = (one for one in self._snapshots[number] if part_of(one[0].decode()) == part)
            await self._redis.run_pipeline(("RESTORE", *key) for key in kept)
        await self._set_full(full)
        self._lose()

    def _lose(self) -> None:
        for entries in self._entries.values():
            entries.lose()

    async def _set_times(self, times: Times) -> None:
        """Make everybody as old, or as soon gone, as memory saw it."""
        seconds, micros = await self._redis.command("TIME")
        now_ms, shards = int(seconds) * 1000 + int(micros) // 1000, self._keys.shards
        commands: list[tuple[Any, ...]] = []
        for key, fields in times.stamps.items():
            for name, (ahead_ms, rest) in fields.items():
                commands.append(("HSET", key, name, b"%d%s" % (now_ms + LONGER * ahead_ms, rest)))
        for at, (who, ahead_ms) in times.held.items():
            entry = self._entries[shards].redis("{}-{}".format(*at))
            commands.append(("XCLAIM", shards, "learners", who, 0, entry, "IDLE", -LONGER * ahead_ms))
        if commands:
            full = bool(self._full)
            await self._set_full(False)
            await self._redis.run_pipeline(commands)
            await self._set_full(full)

    # --- one event ----------------------------------------------------------------------------------

    async def apply(self, event: Event) -> None:
        """Do it too.

        Raises:
            _Unequal: Redis answered something else.
        """
        match event:
            case Called():
                await self._call(event)
            case Expired(key):
                await self._redis.command("UNLINK", key)
            case Snapshot(number):
                await self._save(number)
            case Restarted(snapshot):
                await self._restart(snapshot)
            case FailedOver(parts):
                await self._fail_over(parts)
            case Full(full):
                await self._set_full(full)

    async def _call(self, call: Called) -> None:
        if call.times is not None:
            await self._set_times(call.times)
        try:
            outcome: Any = await getattr(self.bus, call.method)(**self._arguments(call.method, call.args))
        except Exception as error:  # an outcome like any other
            outcome = error
        if isinstance(call.outcome, Exception) or isinstance(outcome, Exception):
            if type(call.outcome) is not type(outcome):
                raise _Unequal(_told(call.outcome), _told(outcome))
            return
        if call.method == "read_tape" and any(self._is_lost(*cursor) for cursor in call.args["cursors"].items()):
            outcome = _last(outcome, Counter(entry.group for entry in call.outcome))
        ids, rest = self._parts(call.method, call.args, call.outcome)
        redis_ids, redis_rest = self._parts(call.method, call.args, outcome)
        if rest != redis_rest or len(ids) != len(redis_ids):
            raise _Unequal(_told(call.outcome), _told(outcome))
        for (stream, memory), (_, redis) in zip(ids, redis_ids, strict=True):
            self._entries[stream].match(memory, redis)

    def _is_lost(self, group: int, cursor: str) -> bool:
        """Whether a tape is read on from an entry of a server that was cut off."""
        return self._entries[self._keys.tape(group)].redis(cursor) == NOWHERE

    def _arguments(self, method: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """As Redis must be given them: its entry ids, longer spans, no blocking."""
        keys = self._keys

        def ids(stream: str, found: Iterable[str]) -> tuple[str, ...]:
            return tuple(self._entries[stream].redis(at) for at in found)

        def offers(p: int, names: Iterable[str]) -> tuple[str, ...]:
            parts = [(name, *parse_offer_id(name)) for name in names]
            return tuple(name.replace(at, ids(keys.deltas(p, learner), [at])[0], 1) for name, learner, at in parts)

        given = {name: value * LONGER if name in SPANS else value for name, value in args.items() if name != "block_s"}
        match method:
            case "commit":
                commit = args["commit"]
                entries, ttl_s = offers(commit.record.fragment, commit.entries), commit.replaced_ttl_s
                given["commit"] = dataclasses.replace(commit, entries=entries, replaced_ttl_s=LONGER * ttl_s)
            case "refuse":
                refusal = args["refusal"]
                entries = offers(args["fragment"], refusal.entries)
                given["refusal"] = dataclasses.replace(refusal, entries=entries)
            case "offer" if args.get("renews"):
                (given["renews"],) = offers(args["header"].fragment, [args["renews"]])
            case "read_offers" if "after" in args:
                after, p = args["after"] or {}, args["fragment"]
                given["after"] = {learner: ids(keys.deltas(p, learner), [at])[0] for learner, at in after.items()}
            case "read_tape":
                cursors = args["cursors"].items()
                given["cursors"] = {group: ids(keys.tape(group), [after])[0] for group, after in cursors}
            case "trim_tape":
                given["before"] = self._entries[keys.tape(args["group"])].from_here(args["before"])
            case "read_events" | "read_evaluations" if "after" in args:
                stream = keys.events if method == "read_events" else keys.evaluations
                given["after"] = ids(stream, [args["after"]])[0]
            case "claim_shard" if "known" in args:
                given["known"] = ids(keys.shards, args["known"])
            case "save_position" | "finish_shard":
                given["entry_id"] = ids(keys.shards, [args["entry_id"]])[0]
        return given

    def _parts(self, method: str, args: Mapping[str, Any], outcome: Any) -> tuple[Ids, Any]:
        """The entry ids in an outcome, and the rest that must be equal."""
        keys = self._keys
        match method:
            case "offer":
                header = args["header"]
                return [(keys.deltas(header.fragment, header.learner), parse_offer_id(outcome)[1])], None
            case "read_offers":
                parts = [parse_offer_id(one.entry_id) for one in outcome]
                streams = [(keys.deltas(args["fragment"], learner), at) for learner, at in parts]
                return streams, [(one.header, one.problem) for one in outcome]
            case "read_tape":
                ids = [(keys.tape(one.group), one.entry_id) for one in outcome]
                return ids, [(one.group, one.record) for one in outcome]
            case "tape_end":
                return [(keys.tape(group), end) for group, end in sorted(outcome.items())], sorted(outcome)
            case "read_events" | "read_evaluations":
                stream = keys.events if method == "read_events" else keys.evaluations
                return [(stream, at) for at, _ in outcome], [message for _, message in outcome]
            case "claim_shard" if outcome is not None:
                return [(keys.shards, outcome.entry_id)], (outcome.shard, outcome.position)
            case "read_reports":
                return [], [seen.report for seen in outcome]  # ages are of different clocks
            case "info":
                return [], None  # about the server, not the run
        return [], outcome

    # --- all that is stored --------------------------------------------------------------------------

    async def compare(self, store: WorldStore) -> None:
        """Whether both servers hold the same.

        Raises:
            _Unequal: naming the first key that differs.
        """
        keys = [key.decode() for key in await self._all_keys()]
        kept = sorted(key for key, value in store.values.items() if value != {})  # on Redis no hash is empty
        if keys != kept:
            raise _Unequal(sorted(set(kept) - set(keys)), sorted(set(keys) - set(kept)), "keys that only one has")
        keys.sort(key=lambda key: not isinstance(store.values[key], Stream))  # they make ids known that others hold
        kinds = await self._redis.run_pipeline(("TYPE", key) for key in keys)
        left = await self._redis.run_pipeline(("PTTL", key) for key in keys)
        reads = {b"string": ("GET",), b"hash": ("HGETALL",), b"stream": ("XRANGE",)}
        ends = {b"stream": ("-", "+")}
        values = await self._redis.run_pipeline(
            (*reads[kind], key, *ends.get(kind, ())) for key, kind in zip(keys, kinds, strict=True)
        )
        for key, kind, ms, value in zip(keys, kinds, left, values, strict=True):
            try:
                if (key in store.expiries) != (ms >= 0):
                    raise _Unequal(key in store.expiries, ms >= 0, "whether it expires")
                await self._compare_value(
                    key, kind.decode(), store.values[key], pairs(value) if kind == b"hash" else value
                )
            except _Unequal as found:
                raise _Unequal(found.memory, found.redis, f"in the end, {key}: {found.what}") from None

    async def _compare_value(self, key: str, kind: str, memory: Any, redis: Any) -> None:
        if isinstance(memory, Stream):
            if kind != "stream" or memory.data != [data for _, (_, data) in redis]:
                raise _Unequal(memory.data, redis, "its entries")
            for mine, (theirs, _) in zip(memory.ids, redis, strict=True):
                self._entries[key].match("{}-{}".format(*mine), theirs.decode())
            await self._compare_group(key, memory)
        elif isinstance(memory, dict) and key == self._keys.shard_positions:
            shards = self._entries[self._keys.shards]
            self._equal({shards.redis(at.decode()).encode(): position for at, position in memory.items()}, redis)
        elif isinstance(memory, dict) and key in {getattr(self._keys, name) for name in STAMPED}:
            behind = [{name: split_stamp(value)[1] for name, value in one.items()} for one in (memory, redis)]
            self._equal(*behind)
        else:
            self._equal(memory, redis)

    def _equal(self, memory: object, redis: object) -> None:
        if memory != redis:
            raise _Unequal(memory, redis, "its value")

    async def _compare_group(self, key: str, memory: Stream) -> None:
        """What was delivered to whom and not acknowledged."""
        groups = await self._redis.command("XINFO", "GROUPS", key)
        if (memory.delivered is None) != (not groups):
            raise _Unequal(memory.delivered, groups, "its consumer group")
        if memory.delivered is None:
            return
        # From a script, as it is: redis-py takes every reply of XPENDING for a summary.
        read = "return redis.call('XPENDING', KEYS[1], 'learners', '-', '+', ARGV[1])"
        pending = await self._redis.command("EVAL", read, 1, key, len(memory.held) + 1)
        held = {self._entries[key].redis("{}-{}".format(*at)): who for at, (who, _) in memory.held.items()}
        redis = {at.decode(): who.decode() for at, who, *_ in pending}
        if held != redis:
            raise _Unequal(held, redis, "what its consumers hold")


def _told(outcome: object) -> str:
    if isinstance(outcome, Exception):
        return f"{type(outcome).__name__}: {outcome}"
    text = str(outcome)
    return text if len(text) <= 2000 else f"{text[:2000]}..."


@dataclass(slots=True)
class Recorded:
    """A world and its history."""

    seed: int
    result: Result
    events: list[Event]
    store: WorldStore
    """What the memory server held in the end."""
    groups: int


def record(seed: int, merges: int = MERGES) -> Recorded:
    """Run a world, with at least so many merges, and keep what its server did."""
    recorder = Recorder()
    result = run_seed(seed, merges=merges, recorder=recorder)
    return Recorded(seed, result, recorder.events, recorder.store, plan(seed).spec.sync.groups)


async def replay(recorded: Recorded, url: str) -> Difference | None:
    """Repeat a recorded world on a Redis server; None if it is the same there.

    Args:
        recorded: what happened.
        url: a server that nobody else uses: its keys of the run, its maxmemory and its scripts are changed.
    """
    redis = await connect_calls(url)
    index = 0
    try:
        there = Replay(redis, recorded.groups)
        await there.clear()
        try:
            for index, event in enumerate(recorded.events):  # noqa: B007  # where it stopped
                await there.apply(event)
            index = len(recorded.events)
            await there.compare(recorded.store)
        except _Unequal as found:
            what = found.what or str(recorded.events[index])
            return Difference(recorded.seed, index, what, _told(found.memory), _told(found.redis))
        finally:
            await there.clear()
    finally:
        await redis.close()
    return None
