"""A whole run under faults: seeded, in virtual time, and checked after every event.

The production syncer service and learner exchange (which run the production window, grace, merge, outer step and
rounds) on the memory bus, each party behind a `Link`. A world goes through three stages: faults strike while
merges go on; then, in half the worlds, all is calm, everybody who was killed is back, and every fragment must go on;
then the run is drained and must finish with its books closed, in the other half while faults go on. The same seed
gives the same digest of all that happened.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import xxhash

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.errors import LeaseLost
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.transfer import payloads
from diloco.pipeline.view.ledger_inputs import read_ledger_inputs
from diloco.workers import rounds
from diloco_studies.virtual.chance import Chance
from diloco_studies.virtual.virtual_time import VirtualClock, run_virtual
from tests.world.archives import Archive
from tests.world.failover import Failovers
from tests.world.lapses import Lapses
from tests.world.link import Fate, Link
from tests.world.oracle import Oracle, Violation
from tests.world.parties import Party, WorldLearner, WorldSyncer
from tests.world.plan import (
    LEARNERS,
    LEASE_S,
    LIVENESS_S,
    MESSAGE_KINDS,
    PAUSES,
    Fault,
    Kind,
    Plan,
    plan,
    ranks,
    without,
)
from tests.world.rank_faults import SLOW_CALL_S, ends_as_a_whole, may_end_by, strike_rank
from tests.world.ranks import WorldRank, start_ranks
from tests.world.record import Recorder, WorldBus, WorldStore, brief
from tests.world.server import Server
from tests.world.takeover import LEASE_CALLS, LEASE_WRITES, Takeover

RUN = "world"
MERGES = 200
"""Least number of merges before a world calms down."""
LIVELY_S = 40.0
"""Seconds in which every fragment goes on: more than the longest wait, an owner's that has measured no upload yet."""
ENDS_S = 100.0
"""Virtual seconds that a drain may take."""
CRASH_WITHIN_S = 2.0
"""A party that does not come to the point of its kill or pause in this time is struck where it is."""
MAX_CALLS = 100_000
"""More than any world needs: above it somebody is busy for nothing."""
MAX_CHUNKS = 400_000
"""The same of calls for chunks, which are as many as chunks are small."""
SHOWN = 400
"""Events kept for a trace."""


@dataclass(slots=True)
class Result:
    """What became of a seed."""

    seed: int
    digest: str
    merges: int
    virtual_s: float
    fired: Counter[str]
    """How often each kind of fault really happened."""
    crashed: Counter[str]
    """At which calls parties were killed: "commit/after"."""
    struck: frozenset[str]
    """Ids of the faults that happened."""
    violation: Violation | None
    trace: list[str] = field(default_factory=list)


class World:
    """One seed."""

    def __init__(
        self, plan: Plan, only: frozenset[str] | None, merges: int, traced: bool, recorder: Recorder | None = None
    ) -> None:
        self.plan, self.spec = plan, plan.spec
        self.layout = layout_of(plan.spec.tensors)
        self.chance = Chance(plan.seed)
        self.store, self.clock = WorldStore(), VirtualClock()
        self._recorder = recorder
        if recorder is not None:
            recorder.watch(self.store)
        self.oracle = Oracle(plan, self.layout, self.store, RunKeys(RUN, plan.spec.sync.groups), self.clock.now)
        self.oracle.on_violation = lambda: self._wake.set()
        self._server = Server(self.store, self.oracle, self.clock)
        self._keys = RunKeys(RUN, plan.spec.sync.groups)
        self._failovers = Failovers(self._server, self.store, self.oracle, self._keys, self.chance, self._links)
        self.takeover = Takeover(len(self.layout.fragments), LEASE_S)
        self._lapses = Lapses(self.store, RunKeys(RUN, plan.spec.sync.groups), self.clock.now)
        self.fired: Counter[str] = Counter()
        self.crashed: Counter[str] = Counter()
        self.struck: set[str] = set()
        self._only, self._merges, self._traced = only, merges, traced
        self._wake = asyncio.Event()
        self._calm = False
        self._effects = [0, 0]
        """Calls that took effect, those for chunks second."""
        self._digest = xxhash.xxh3_128()
        self._trace: deque[str] = deque(maxlen=SHOWN)
        self._parties: dict[str, Party] = {}
        self._lives: Counter[str] = Counter()
        self._armed: dict[str, Fault] = {}
        self._archive: Archive | None = None
        self._archive_links: list[Link] = []
        self._beside: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Task[None] | None = None

    # --- what happens is written down ------------------------------------------------------------------

    def note(self, who: str, what: str, more: str = "") -> None:
        """Add an event to the digest, and to the trace if one is wanted."""
        line = f"{self.clock.now():.6f} {who} {what} {more}"
        self._digest.update(line.encode())
        if self._traced:
            self._trace.append(line)

    def happened(self, kind: Kind, id_: str) -> None:
        """A fault struck."""
        self.fired[kind] += 1
        self.struck.add(id_)
        self.note("fault", kind, id_)

    def _may(self, id_: str) -> bool:
        """Whether a fault is among those that are tried."""
        return not self._calm and (self._only is None or id_ in self._only)

    # --- what links ask ----------------------------------------------------------------------------------

    def bus_up(self, link: Link) -> bool:
        """Whether the server that a party reaches answers."""
        return link.beside or self._server.up

    def fate(self, party: str, number: int, method: str) -> Fate:
        """What happens to a call."""
        chance = self.chance
        drawn = chance.integer("call", party, number)
        delay_s = self.plan.latency_s * (0.5 + (drawn & 0xFFFFFFFF) / 2**32)
        if party in self._parties and self.clock.now() < self._parties[party].link.slow_until:
            delay_s += SLOW_CALL_S * (drawn & 0xFFFF) / 2**16
        if self._calm or party not in self._parties or (drawn >> 32) / 2**32 >= self.plan.message_fault_rate:
            return Fate(delay_s)
        id_ = f"call-{party}-{number}"
        if not self._may(id_):
            return Fate(delay_s)
        kind = chance.one_of(MESSAGE_KINDS, "fate", party, number)
        self.happened(kind, id_)
        if method in LEASE_CALLS:
            self.takeover.disturbed(self.clock.now())
        if kind is Kind.MESSAGE_DELAYED:
            return Fate(delay_s + chance.between(0.01, 0.8, "delay", party, number))
        return Fate(
            delay_s,
            lost=kind is Kind.MESSAGE_LOST,
            reply_lost=kind is Kind.REPLY_LOST,
            twice=kind is Kind.MESSAGE_DUPLICATED,
            late_s=chance.between(0.4, 1.5, "late", party, number) if kind is Kind.MESSAGE_LATE else 0.0,
        )

    def crash_point(self, link: Link, method: str, after: bool) -> None:
        """Kill or pause the party if a fault is armed for this point."""
        fault = self._armed.get(link.party)
        if fault is not None and fault.method == method and fault.after is after and not link.dead:
            del self._armed[link.party]
            self._hit(fault, self._parties[link.party], f"{method}/{'after' if after else 'before'}")

    def observe(self, link: Link, method: str, args: tuple[Any, ...], more: dict[str, Any], outcome: Any) -> None:
        """A call took effect."""
        if isinstance(outcome, LeaseLost):
            self.fired[Kind.TWO_HOLDERS] += 1
        elif method == "acquire_lease" and outcome is True and not link.beside:
            self.takeover.taken(args[0])
        if link.late and not link.beside and method in LEASE_WRITES:
            self.takeover.disturbed(self.clock.now())
        nonce = party.service.nonce if isinstance(party := self._parties.get(link.party), WorldSyncer) else ""
        if not (link.late or link.beside) and self._lapses.found(nonce, method, args, outcome):
            self.fired[Kind.LEASE_EXPIRED_IN_MERGE] += 1
        chunks = method in ("write_chunks", "read_chunks")
        self._effects[chunks] += 1
        if self._effects[chunks] > (MAX_CHUNKS if chunks else MAX_CALLS):
            self.oracle.broken("nobody is busy for nothing", f"{self._effects[chunks]} calls, the last one {method}")
        error = type(outcome).__name__ if isinstance(outcome, Exception) else ""
        self.note(link.party, method, f"{brief(method, args)} {error}")
        self.oracle.observe(link, method, args, outcome)

    def later(self, delay_s: float, effect: Callable[[], Awaitable[None]]) -> None:
        """Have a call take effect on its own, whatever became of its caller."""

        async def arrive() -> None:
            await asyncio.sleep(delay_s)
            await effect()

        self._spawn(arrive())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Do something beside the story; an error of it ends the world."""
        self._beside.add(task := asyncio.create_task(work))
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._beside.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed = self._failed or task
            self._wake.set()

    def overtaken(self, party: str) -> None:
        """A call was answered before one made earlier."""
        if not self._calm:
            self.fired[Kind.MESSAGES_REORDERED] += 1

    def link(self, party: str) -> Link:
        """A connection for a new life of a party."""
        before = self._parties.get(party)
        return Link(self._bus(party), self, party, before.link.calls if before else 0, self.plan.hangs_s)

    def _bus(self, who: str) -> WorldBus:
        """A connection to the server."""
        if self._recorder is None:
            return WorldBus(RUN, self._server.clock, self.store)
        return self._recorder.bus(RUN, self._server.clock, self.store, who)

    def poisons(self, what: tuple[object, ...]) -> bool:
        """Whether this delta is poisoned."""
        id_ = f"poison-{xxhash.xxh3_64_hexdigest(repr(what).encode())}"
        if self.chance.share("poison", what) >= self.plan.poison_rate or not self._may(id_):
            return False
        self.happened(Kind.DELTA_POISONED, id_)
        return True

    def merge_takes_s(self, party: str, number: int) -> float:
        """How long heavy work takes: now and then longer than a lease."""
        id_ = f"slow-{party}-{self._lives[party]}-{number}"
        if self.chance.share("slow", id_) >= self.plan.slow_merge_rate or not self._may(id_):
            return 0.0005
        self.happened(Kind.SLOW_MERGE, id_)
        return self.chance.between(0.3, 1.5, "slow merge", id_)

    # --- parties -----------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        """A syncer, or a learner with all of its ranks."""
        kind, _, text = name.partition("-")
        number = int(text)
        self._lives[name] += 1
        life = self._lives[name]
        if kind == "syncer":
            self._begin(WorldSyncer(self, number, life))
        elif not self.plan.together[number % self.plan.learners]:
            self._begin(WorldLearner(self, number, life))
        else:
            count = ranks(self.chance, number, life)
            self.fired[Kind.OTHER_RANKS] += life > 1 and count != ranks(self.chance, number, life - 1)
            start_ranks(self, number, life, count, self._begin)

    def _begin(self, party: Party) -> None:
        self._parties[party.name] = party
        party.start(party.live)
        assert party.task is not None  # just started
        party.task.add_done_callback(lambda task: self._ended(party, task))
        self.note(party.name, "started", str(party.life))

    def _start_all(self) -> None:
        """All who are to be there and are not."""
        for kind, count in (("syncer", self.plan.syncers), ("learner", self.plan.learners)):
            for name in (f"{kind}-{i}" for i in range(count)):
                if not self._is_alive(name):
                    self._start(name)

    def _ended(self, party: Party, task: "asyncio.Task[None]") -> None:
        if party.link.dead or task.cancelled():
            return
        if (error := task.exception()) is not None:
            parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
            if not may_end_by(party, parts[0]):
                self.oracle.broken("a party ends only when told to", f"{party.name}: {parts[0]!r}")
        party.alive = False
        self.note(party.name, "ended")

    def _dying(self) -> list[Party]:
        """Ranks of learners of which another one was killed."""
        return [one for one in self._alive("learner") if isinstance(one, WorldRank) and one.crew.struck]

    def _alive(self, kind: str) -> list[Party]:
        return [party for name, party in sorted(self._parties.items()) if name.startswith(kind) and party.alive]

    # --- faults --------------------------------------------------------------------------------------------

    async def _strike_all(self, faults: Sequence[Fault]) -> None:
        """Each at its time from now on."""
        striking, began = [], self.clock.now()
        for fault in without(faults, self._only):
            await asyncio.sleep(max(0.0, began + fault.at_s - self.clock.now()))
            striking.append(self._spawn(self._strike(fault)))
        if striking:
            await asyncio.wait(striking)

    async def _strike(self, fault: Fault) -> None:
        kind = "learner" if fault.kind.startswith("learner") else "syncer"
        alive = self._alive(kind)
        learners = {party.unit for party in alive}
        of_ranks = [one for one in self._alive("learner") if isinstance(one, WorldRank) and one.crew.ranks > 1]
        match fault.kind:
            case Kind.LEARNER_KILLED | Kind.SYNCER_KILLED | Kind.LEARNER_PAUSED | Kind.SYNCER_PAUSED if alive:
                await self.strike_down(fault, alive[fault.party % len(alive)])
            case _ if fault.kind.startswith("rank"):
                if of_ranks:
                    await strike_rank(self, fault, of_ranks[fault.party % len(of_ranks)])
            case Kind.LEARNER_JOINED if len(learners) < LEARNERS:
                self._join(fault)
            case Kind.LEARNER_LEFT if len(learners) > 1:
                await self._send_away(fault, alive[fault.party % len(alive)])
            case Kind.SYNCER_REPLACED if alive:
                await self._send_away(fault, alive[fault.party % len(alive)])
            case Kind.PARTITION if everybody := self._alive(""):
                self.happened(fault.kind, fault.id)
                self.cut(everybody[fault.party % len(everybody)], fault.lasts_s)
            case Kind.BUS_RESTARTED | Kind.BUS_REWOUND:
                await self._server.restart(fault, lambda: self._disconnected(fault))
            case Kind.BUS_FAILED_OVER | Kind.BUS_SPLIT:
                await self._failovers.strike(fault, lambda moved_s: self._taken_over(fault, moved_s))
            case Kind.BUS_FULL:
                self.happened(fault.kind, fault.id)
                await self._server.fill(fault.lasts_s)

    def _disconnected(self, fault: Fault) -> None:
        self.happened(fault.kind, fault.id)
        for link in [party.link for party in self._parties.values()] + self._archive_links:
            if not link.beside:
                link.break_calls()

    def _taken_over(self, fault: Fault, moved_s: float) -> None:
        """By a server whose clock is ahead by so much; behind, what was to end by it ends later."""
        self._disconnected(fault)
        self.takeover.disturbed(self.clock.now() + max(0.0, -moved_s))

    def _links(self) -> list[Link]:
        return [party.link for _, party in sorted(self._parties.items()) if party.alive] + self._archive_links

    def cut(self, party: Party, lasts_s: float) -> None:
        party.link.cut_until = self.clock.now() + lasts_s
        party.link.break_calls()

    async def strike_down(self, fault: Fault, party: Party) -> None:
        """Kill or pause it at its point; start a killed one again some time later."""
        if fault.method:
            if party.name in self._armed:
                return
            self._armed[party.name] = fault
            await asyncio.sleep(CRASH_WITHIN_S)
        if not fault.method or self._armed.get(party.name) is fault:
            self._armed.pop(party.name, None)
            self._hit(fault, party, "anywhere")
        if fault.kind not in PAUSES:
            await asyncio.sleep(fault.lasts_s)
            while not self._calm and any(one.unit == party.unit for one in self._dying()):
                await asyncio.sleep(0.05)
            if not self._calm and not self._is_alive(party.unit):
                self._start(party.unit)

    def _hit(self, fault: Fault, party: Party, where: str) -> None:
        if party.alive:
            self.happened(fault.kind, fault.id)
            if fault.kind in PAUSES:
                party.pause(fault.lasts_s)
            else:
                self.crashed[where] += 1
                self.note(party.name, "killed", where)
                party.kill()
                if isinstance(party, WorldRank):
                    self._spawn(ends_as_a_whole(self, party.crew))

    def _join(self, fault: Fault) -> None:
        free = [name for i in range(LEARNERS) if not self._is_alive(name := f"learner-{i}")]
        if free:
            self.happened(fault.kind, fault.id)
            self._start(free[fault.party % len(free)])

    def _is_alive(self, name: str) -> bool:
        """Whether any process of a party is."""
        return any(party.alive for party in self._parties.values() if party.unit == name)

    async def _send_away(self, fault: Fault, party: Party) -> None:
        """As SIGTERM, and another one in its place after a while."""
        self.happened(fault.kind, fault.id)
        party.leave()
        life = self._lives[party.unit]
        await asyncio.sleep(fault.lasts_s)
        deadline = self.clock.now() + ENDS_S
        while self._is_alive(party.unit) and not self._calm and self.clock.now() < deadline:  # in its own time
            if self._lives[party.unit] != life:
                return  # it has joined again meanwhile
            await asyncio.sleep(0.05)
        if not self._calm and not self._is_alive(party.unit):
            self._start(party.unit)

    # --- the three stages ------------------------------------------------------------------------------------

    async def live(self) -> None:
        """All of it; returns early at the first violation."""
        story, wake = asyncio.create_task(self._story()), asyncio.create_task(self._wake.wait())
        await asyncio.wait({story, wake}, return_when=asyncio.FIRST_COMPLETED)
        if story.done():
            story.result()
        for task in (story, wake):
            task.cancel()
        if self._failed is not None:
            self._failed.result()  # raises
        for party in self._parties.values():
            party.kill()
        await asyncio.gather(*(party.task for party in self._parties.values() if party.task), return_exceptions=True)

    async def _story(self) -> None:
        self._start_all()
        if self.plan.fails_over:
            bus = WorldBus(RUN, self._server.clock, self.store)  # not recorded: it only reads
            bus.use_spec(self.spec)
            self._archive = Archive(Link(bus, self, "archive", 0, self.plan.hangs_s), self.spec.sync.groups)
            self._archive_links = [self._archive.link]
            self._following = self._spawn(self._archive.follow())
        striking = self._spawn(self._strike_all(self.plan.faults))
        if not await self._until(lambda: self.oracle.merges >= self._merges and striking.done()):
            return
        if self.plan.calm_end and not await self._calm_down():
            return
        await self._drain()

    async def _calm_down(self) -> bool:
        """No more faults; whoever is missing comes back, and all goes on."""
        self._calm = True
        self._armed.clear()
        self.note("world", "calm")
        while self._dying():
            await asyncio.sleep(0.05)
        self._start_all()
        goals = [(fragment.version + 2, p) for p, fragment in enumerate(self.oracle.fragments)]
        return await self._until(lambda: all(self.oracle.fragments[p].version >= goal for goal, p in goals))

    async def _until(self, reached: Any) -> bool:
        """Wait until a condition holds; a fragment that does not go on for long is a violation."""
        versions = [fragment.version for fragment in self.oracle.fragments]
        since = [self.clock.now()] * len(versions)
        while not reached():
            await asyncio.sleep(0.05)
            self._look_at_leases()
            for p, fragment in enumerate(self.oracle.fragments):
                if fragment.version != versions[p]:
                    versions[p], since[p] = fragment.version, self.clock.now()
                elif self.clock.now() - since[p] > LIVELY_S:
                    self.oracle.broken("every fragment goes on", f"{p} did not for {LIVELY_S:.0f} s: {versions}")
                    return False
        return True

    def _look_at_leases(self) -> None:
        """Whether those that are free are taken in time."""
        syncers = [party for party in self._alive("syncer") if isinstance(party, WorldSyncer) and party.serves]
        syncers = [syncer for syncer in syncers if not syncer.link.beside]
        free = [
            not self.store.has(self._keys.lease(p), self.clock.now())
            and all(syncer.service.owners[p].idle.is_set() for syncer in syncers)
            for p in range(len(self.layout.fragments))
        ]
        able = [f"{syncer.name}.{syncer.life}" for syncer in syncers]
        lost = [p for p in range(len(free)) if not self.store.has(self._keys.head(p), self.clock.now())]
        broken = self.takeover.look(self.clock.now(), free, able, self._server.up and not self.store.full, lost)
        if broken is not None:
            self.oracle.broken("take-over within two lease times", broken)

    async def _drain(self) -> None:
        """The user ends the run; all parties end, and the books close."""
        bus = self._bus("world")
        bus.use_spec(self.spec)
        self.oracle.draining()
        self.note("world", "draining")
        striking = self._spawn(self._strike_all(self.plan.end_faults))
        deadline = self.clock.now() + ENDS_S
        while not await self._ended_in_order(bus, striking.done()):
            await asyncio.sleep(0.1)
            if self.clock.now() > deadline:
                left = [party.name for party in self._alive("")]
                self.oracle.broken("a drained run ends", f"after {ENDS_S:.0f} s there are still {left}")
                return
        self._check_end(await bus.read_state())
        ledger_inputs = await read_ledger_inputs(bus, len(self.layout.fragments), LIVENESS_S)
        self.oracle.check_ledger(ledger_inputs)
        if self._archive is not None:
            self._following.cancel()
            await self._archive.follow(0.0)
            self.oracle.check_archive(self._archive, ledger_inputs)

    async def _ended_in_order(self, bus: WorldBus, struck: bool) -> bool:
        """Whether the run is finished and all are gone; does what its user does, and the one who runs the syncers.

        A bus without its last second may have forgotten that the run was to drain, or that it is finished.
        """
        state = await bus.read_state()
        if state is not None and state.phase is Phase.RUNNING:
            await bus.write_state(state.model_copy(update={"phase": Phase.DRAINING, "reason": "asked by the world"}))
        elif struck and state is not None and state.phase is not Phase.FINISHED and not self._alive("syncer"):
            self._start("syncer-0")
        return struck and not self._alive("") and state is not None and state.phase is Phase.FINISHED

    def _check_end(self, state: RunState | None) -> None:
        if state is None or state.phase is not Phase.FINISHED:
            self.oracle.broken("a drained run is finished", f"its state is {state and state.phase}")
            return
        self.oracle.check_finished(state.manifest)

    def result(self) -> Result:
        """What became of it."""
        return Result(
            seed=self.plan.seed,
            digest=self._digest.hexdigest(),
            merges=self.oracle.merges,
            virtual_s=self.clock.now(),
            fired=self.fired,
            crashed=self.crashed,
            struck=frozenset(self.struck),
            violation=self.oracle.violation,
            trace=list(self._trace),
        )


def run_seed(
    seed: int,
    *,
    only: frozenset[str] | None = None,
    merges: int = MERGES,
    traced: bool = False,
    recorder: Recorder | None = None,
) -> Result:
    """Run one seed's world to its end, or to its first violation.

    Args:
        seed: which world.
        only: ids of the faults to try; None: all of them.
        merges: least number of merges before the faults cease.
        traced: keep the last events for people to read.
        recorder: gets all that the server did, for `twin`.
    """

    async def main() -> Result:
        world = World(plan(seed), only, merges, traced, recorder)
        await world.live()
        return world.result()

    with _sizes(plan(seed)):
        return run_virtual(main())


@contextmanager
def _sizes(of: Plan) -> Iterator[None]:
    """Small payloads travel in several calls too, so that a party can be killed between them; and small models may have
    no room for snapshots of all fragments at a time, as large ones.
    """
    usual = payloads.PIECE_BYTES, rounds.MIN_ROOM, rounds.AT_ONCE
    payloads.PIECE_BYTES = of.piece_bytes
    if of.has_little_room:
        rounds.MIN_ROOM, rounds.AT_ONCE = 0, 1
    try:
        yield
    finally:
        payloads.PIECE_BYTES, rounds.MIN_ROOM, rounds.AT_ONCE = usual
