"""What a world's memory server did, in the order in which it did it: enough to do the same to another server.

A recorded bus notes a call in the same step in which it takes effect, so that the order is the true one. The
server's own events lie between the calls: keys that expired, the snapshot of a rewind, restarts, another server in
its place, memory full. What is done on a server that was cut off is not noted: nothing of it is left.
A blocking read that ended empty is left out: it says when nothing came, not what is there.
"""

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.errors import BusFull, BusUnavailable
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.memory_store import EntryId, MemoryStore, Stream, Value

Saved = tuple[dict[str, Value], dict[str, float]]


STAMPED = ("seen", "syncers")
"""Hashes (of `RunKeys`) whose values begin with a time of the server, in ms, past or to come."""
TIMED = ("claim_shard", "announce_syncer", "read_syncers", "read_savers")
"""Methods whose outcome depends on such a time, or on how long a shard has been held."""


def split_stamp(value: bytes) -> tuple[int, bytes]:
    """A value of a stamped hash as its time in ms and what stands behind it."""
    digits = len(value) - len(value.lstrip(b"0123456789"))
    return int(value[:digits]), value[digits:]


@dataclass(frozen=True, slots=True)
class Times:
    """By what a call could tell who is here and who is gone: times in ms from when it came, past ones negative."""

    stamps: Mapping[str, Mapping[bytes, tuple[int, bytes]]]
    """Key -> field -> (time, what stands behind it)."""
    held: Mapping[EntryId, tuple[str, int]]
    """Entry of the work queue -> (its holder, when it was delivered)."""


@dataclass(frozen=True, slots=True)
class Called:
    """A call took effect."""

    at_s: float
    who: str
    method: str
    args: Mapping[str, Any]
    """By name."""
    outcome: Any
    """What it returned, or the exception that it raised."""
    times: Times | None
    """For the methods that look at them."""

    def __str__(self) -> str:
        told = ", ".join(f"{name}={_short(value)}" for name, value in self.args.items())
        return f"{self.at_s:.6f} {self.who} {self.method}({told})"


@dataclass(frozen=True, slots=True)
class Expired:
    """A key's time was over."""

    key: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is stored now will be there again after the restart with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The server came back: with all it had, or with a snapshot."""

    snapshot: int | None


@dataclass(frozen=True, slots=True)
class Full:
    """From now on there is no memory for writes, or there is again."""

    full: bool


@dataclass(frozen=True, slots=True)
class FailedOver:
    """Another server took over for good. Of each part (a hash tag) it has what was there at a snapshot."""

    parts: Mapping[str, int]


Event = Called | Expired | Snapshot | Restarted | FailedOver | Full


def part_of(key: str) -> str:
    """The hash tag of a key: all keys that share it lie on one node of a cluster."""
    return key[key.index("{") + 1 : key.index("}")]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}..."


class WorldStore(MemoryStore):
    """A store that can be full for a while, whatever it holds, and tells what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[Event], None] = lambda event: None
        self._full = False
        self._saved: list[Saved] = []

    @property
    def full(self) -> bool:
        """Whether there is no memory for writes."""
        return self._full

    @full.setter
    def full(self, full: bool) -> None:
        self._full = full
        self.tell(Full(full))

    def need_room(self) -> None:
        """Refuse while full."""
        if self._full:
            raise BusFull("memory is full")

    def get(self, key: str, kind: type[Any], now: float) -> Any:
        """The live value of a key, or None."""
        if self.expiries.get(key, now + 1) <= now:
            self.tell(Expired(key))
        return super().get(key, kind, now)

    def has(self, key: str, now: float) -> bool:
        """Whether a key is there; only looks, and expires nothing."""
        return key in self.values and self.expiries.get(key, now + 1) > now

    def snapshot(self) -> Saved:
        """All that is stored now, for `restart`."""
        self._saved.append(super().snapshot())
        self.tell(Snapshot(len(self._saved) - 1))
        return self._saved[-1]

    def come_back(self) -> None:
        """Restart with all there is."""
        self.tell(Restarted(None))

    def restart(self, saved: Saved | None) -> None:
        """Restart with what was saved."""
        super().restart(saved)
        self.tell(Restarted(self._number(saved)))

    def fail_over(self, parts: Mapping[str, Saved], moved_s: float) -> None:
        """Another server is in its place: of each part it has what was saved, and its clock is `moved_s` ahead of
        the one before. Expiries are times of that clock."""
        values: dict[str, Value] = {}
        expiries: dict[str, float] = {}
        for part, (theirs, until) in parts.items():
            values |= {key: value for key, value in theirs.items() if part_of(key) == part}
            expiries |= {key: at - moved_s for key, at in until.items() if part_of(key) == part}
        super().restart((values, expiries))
        self.tell(FailedOver({part: self._number(saved) for part, saved in parts.items()}))

    def _number(self, saved: Saved | None) -> int:
        return next(i for i, one in enumerate(self._saved) if one is saved)

    def beside(self) -> "WorldStore":
        """The same server, as those still have it who are cut off together with it."""
        old = WorldStore()
        old.values, old.expiries = super().snapshot()
        return old

    def hand_over(self, waiters: Collection[asyncio.Event], other: "WorldStore") -> None:
        """Reads that wait here wait there."""
        for key, waiting in list(self._waiters.items()):
            for waiter in [waiter for waiter in waiting if waiter in waiters]:
                other.enlist([key], waiter)
                self.discharge([key], waiter)


class Seen:
    """What an onlooker sees of the servers: one of them at a time."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    @property
    def values(self) -> dict[str, Value]:
        return self.store.values

    @property
    def expiries(self) -> dict[str, float]:
        return self.store.expiries


class WorldBus(MemoryBus):
    """A memory bus behind a link: the link's delay is the way to the server, so a call acts at once."""

    def __init__(self, run: str, clock: Clock, store: WorldStore) -> None:
        super().__init__(run, clock, store)
        self.server = store

    def move(self, store: WorldStore) -> None:
        """Reach another server from now on, with the reads that wait."""
        self.server.hand_over(self._waiters.keys(), store)
        self.store = self.server = store

    async def _turn(self) -> None:
        """Give way to nobody."""


@dataclass(slots=True)
class Recorder:
    """Collects the events of one world."""

    events: list[Event] = field(default_factory=list)
    store: WorldStore = field(default_factory=WorldStore)
    """The world's server; after the world, what it holds in the end."""

    def watch(self, store: WorldStore) -> None:
        """Listen to the server."""
        self.store = store
        store.tell = self.events.append

    def bus(self, run: str, clock: Clock, store: WorldStore, who: str) -> WorldBus:
        """A connection whose calls are noted."""
        return RecordedBus(run, clock, store, who)


class RecordedBus(WorldBus):
    """A world's bus that notes each call as it takes effect."""

    def __init__(self, run: str, clock: Clock, store: WorldStore, who: str) -> None:
        super().__init__(run, clock, store)
        self._who = who
        self._now_ms = 0
        self._stamped: dict[str, dict[bytes, bytes]] = {}
        self._held: dict[EntryId, tuple[str, int]] = {}

    async def _turn(self) -> None:
        await super()._turn()
        # From here on the call's work is done, and noted, without giving way. It may change these:
        found = {key: self.store.values.get(key) for key in (getattr(self.keys, name) for name in STAMPED)}
        shards = self.store.values.get(self.keys.shards)
        self._now_ms = int(self.clock.unix() * 1000)
        self._stamped = {key: dict(value) for key, value in found.items() if isinstance(value, dict)}
        self._held = dict(shards.held) if isinstance(shards, Stream) else {}

    def _times(self) -> Times:
        now_ms = self._now_ms
        stamps = {}
        for key, values in self._stamped.items():
            split = {field: split_stamp(value) for field, value in values.items()}
            stamps[key] = {field: (at_ms - now_ms, rest) for field, (at_ms, rest) in split.items()}
        return Times(stamps, {at: (who, since_ms - now_ms) for at, (who, since_ms) in self._held.items()})

    def note(self, method: str, args: Mapping[str, Any], outcome: Any) -> None:
        """A call took effect; what its caller may still change is copied."""
        if args.get("block_s") and outcome == []:
            return
        mine = {name: copy(value) if isinstance(value, (dict, list, set)) else value for name, value in args.items()}
        times = self._times() if method in TIMED else None
        self.server.tell(Called(self.clock.now(), self._who, method, mine, copy(outcome), times))


def _noted(name: str) -> Callable[..., Any]:
    method = getattr(MemoryBus, name)
    signature = inspect.signature(method)

    async def call(self: RecordedBus, *args: Any, **more: Any) -> Any:
        named = dict(signature.bind(self, *args, **more).arguments)
        del named["self"]
        try:
            outcome = await method(self, *args, **more)
        except BusUnavailable:
            raise  # a read that waited when the connection broke: it did nothing
        except Exception as error:
            self.note(name, named, error)
            raise
        self.note(name, named, outcome)
        return outcome

    return call


for _name, _ in inspect.getmembers(Bus, inspect.iscoroutinefunction):
    if _name != "close":
        setattr(RecordedBus, _name, _noted(_name))


def brief(method: str, args: tuple[Any, ...]) -> str:
    """What a call was about, without its values."""
    match method, args:
        case "offer", (header, *_):
            return f"p{header.fragment} base {header.base_version} attempt {header.attempt} due {header.due}"
        case "commit", (commit,):
            who = ",".join(part.learner for part in commit.record.contributions)
            return f"p{commit.record.fragment} version {commit.record.version} of {who}"
        case "refuse", (p, refusal):
            return f"p{p} {[(r.learner, r.reason.value) for r in refusal.records]}"
        case "write_window", (p, _, _, window, _):
            return f"p{p} {window.state} attempt {window.attempt} {window.reason}"
        case (("acquire_lease" | "release_lease"), (p, *_)):
            return f"p{p}"
    return ""
