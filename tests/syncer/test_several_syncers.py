"""Several syncers of one run: sharing, taking over, restarting and ending together. Virtual time, memory bus."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.fragment import Committed, RefusalReason, Rejected
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.outer_cost import Speed, matrix_operations
from diloco.pipeline.view.merged_share import RECENT_S, SAMPLE_S
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.refusals import TOLD_A_WINDOW
from diloco.syncer.serving.leases import holding
from diloco.syncer.serving.service import SyncerService
from diloco.tape import read_archive
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests import samples, slow_beyond
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

LEASE_S = 5.0
P = 6
ENDLESS = 10**9


class Syncer:
    """One life of a syncer in a world."""

    def __init__(self, world: VirtualRun, name: str, **settings: Any) -> None:
        self.service: SyncerService = world.start_syncer(syncer_id=name, **settings)
        self.task, self.stop = world.syncer, world.stop
        self.merging: Callable[[int], Awaitable[None]] | None = None
        """Awaited before each merge, with its fragment."""
        self.service._offload = self._offload  # it has not begun yet

    async def _offload(self, work: Any, *args: Any) -> Any:
        if self.merging is not None and getattr(work, "__name__", "") == "merge":
            await self.merging(work.__self__.layout.id)
        return work(*args)

    @property
    def held(self) -> set[int]:
        return {owner.id for owner in self.service.owners if owner.lease.is_set()}

    @property
    def bus(self) -> Bus:
        return self.service.bus

    async def end(self) -> None:
        """As SIGTERM."""
        self.stop.set()
        await self.task

    async def kill(self) -> None:
        """As SIGKILL: nothing that it says is heard any more."""
        await self.bus.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def slow_merges(syncer: Syncer, takes_s: float) -> None:
    """Merges take a while; nothing else does."""

    async def merging(_: int) -> None:
        await asyncio.sleep(takes_s)

    syncer.merging = merging


class OneUnanswered:
    """A bus of which one call gets no answer for as long as a real one waits: the first, once armed, of a method."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.method, self.takes_effect, self.happened = "", False, False

    def arm(self, method: str, takes_effect: bool) -> None:
        self.method, self.takes_effect = method, takes_effect

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._bus, name)
        if not callable(original):
            return original

        async def call(*args: Any) -> Any:
            if name != self.method or self.happened:
                return await original(*args)
            self.happened = True
            if self.takes_effect:
                await original(*args)
            await asyncio.sleep(BUS_TIMES.call_s)
            raise BusUnavailable("no answer")

        return call


def unanswered(syncer: Syncer) -> OneUnanswered:
    """Between a syncer's leases, and nothing else of it, and the bus."""
    bus = OneUnanswered(syncer.bus)
    syncer.service.serving.leases._bus = bus  # type: ignore[assignment]  # every method of a bus
    return bus


async def until(reached: Callable[[], bool], limit_s: float) -> float:
    """Seconds until a condition holds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(limit_s):
        while not reached():
            await asyncio.sleep(0.01)
    return loop.time() - began


async def sharing(names: str = "ab", **settings: Any) -> tuple[VirtualRun, list[Syncer], list[VirtualLearner]]:
    """An endless run of P fragments, and two learners, once its syncers have shared them."""
    world = VirtualRun(sync_spec(fragments=P, tokens=ENDLESS), **settings)
    syncers = [Syncer(world, name) for name in names]
    learners = learners_of(world)
    await until(lambda: {len(one.held) for one in syncers} == {P // len(syncers)}, 2 * LEASE_S)
    return world, syncers, learners


def saved(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*/checkpoint-*")]


def archives(folder: Path) -> list[Path]:
    return list(folder.glob("*.msgpack"))


def learners_of(world: VirtualRun, n: int = 2) -> list[VirtualLearner]:
    return [VirtualLearner(f"l{i}", world, 0.1 + 0.01 * i, f"{i:016x}").start() for i in range(n)]


def check_books(world: VirtualRun, heads: list[Any], learners: list[VirtualLearner]) -> None:
    """Trained = merged + overwritten + rejected, to the token-element."""
    elements = [f.elements for f in learners[0].exchange.member.layout.fragments]
    trained = sum(learner.rounds.tokens for learner in learners) * sum(elements)
    overwritten = sum(learner.rounds.overwritten for learner in learners)
    merged = sum(h.merged_tokens * n for h, n in zip(heads, elements, strict=True))
    rejected = sum(h.rejected_tokens * n for h, n in zip(heads, elements, strict=True))
    assert merged + overwritten + rejected == trained


async def nothing_left(world: VirtualRun) -> None:
    """No header, no lease, no syncer."""
    count = world.spec.sync.fragments
    assert [await world.bus.read_offers(p) for p in range(count)] == [[]] * count
    await nothing_left_held(world)


async def nothing_left_held(world: VirtualRun) -> None:
    """No lease, no syncer."""
    count = world.spec.sync.fragments
    assert await world.bus.read_leases(range(count)) == [None] * count
    assert await world.bus.read_syncers() == {}


async def ask_to_drain(world: VirtualRun) -> None:
    state = await world.bus.read_state()
    await world.bus.write_state(state.model_copy(update={"phase": Phase.DRAINING}))


# --- sharing -------------------------------------------------------------------------------------------


@in_virtual_time
async def test_fragments_are_shared_anew_whenever_a_syncer_comes_or_goes() -> None:
    """Each has its quota within a lease time, the lead stays, and every fragment is merged on."""
    world = VirtualRun(sync_spec(fragments=P, tokens=ENDLESS))
    a = Syncer(world, "a")
    learners = learners_of(world)
    await world.until_version(1)
    assert a.held == set(range(P))
    b = Syncer(world, "b")
    await until(lambda: (len(a.held), len(b.held)) == (3, 3), LEASE_S)
    c = Syncer(world, "c")
    await until(lambda: [len(s.held) for s in (a, b, c)] == [2, 2, 2], LEASE_S)
    assert 0 in a.held
    assert a.held | b.held | c.held == set(range(P))
    version = min(await world.versions())
    await world.until_version(version + 2, 10.0)
    await c.end()
    await until(lambda: (len(a.held), len(b.held)) == (3, 3), LEASE_S)
    version = min(await world.versions())
    await world.until_version(version + 2, 10.0)
    by = {r.syncer for r in await world.tape() if isinstance(r, Committed) and r.contributions}
    assert by == {"a", "b", "c"}
    await end(*learners)
    await a.end()
    await b.end()


@in_virtual_time
async def test_a_merge_in_hand_is_committed_before_its_fragment_is_given_back() -> None:
    """A syncer joins while the other is in merges that take longer than a poll: none of them is lost."""
    world = VirtualRun(sync_spec(fragments=P, tokens=ENDLESS))
    a = Syncer(world, "a")
    slow_merges(a, 3.0)
    learners = learners_of(world)
    await world.until_version(1)
    b = Syncer(world, "b")
    given = asyncio.Event()
    release = a.bus.release_lease

    async def noted(fragment: int, nonce: str) -> None:
        assert a.service.owners[fragment].idle.is_set()
        given.set()
        await release(fragment, nonce)

    a.bus.release_lease = noted  # type: ignore[method-assign]
    await until(lambda: (len(a.held), len(b.held)) == (3, 3), 3 * LEASE_S)
    assert given.is_set()
    version = min(await world.versions())
    await world.until_version(version + 1, 20.0)
    registry = a.service.metrics.registry
    assert registry.get_sample_value("diloco_lease_losses_total") == 0
    await end(*learners)


@pytest.mark.parametrize("after_s", [0.0, 0.4, 0.8, 1.2, 1.6])
@in_virtual_time
async def test_a_dead_syncers_fragments_are_taken_over_within_two_lease_times(after_s: float) -> None:
    """Wherever in its period it dies: its leases end within one lease time, and a third of one later all are taken."""
    world, (a, b), learners = await sharing()
    await asyncio.sleep(after_s)
    orphans, before = sorted(b.held), await world.versions()
    await b.kill()
    took_s = await until(lambda: a.held == set(range(P)), 2 * LEASE_S)
    assert LEASE_S * 2 / 3 - 0.1 <= took_s <= LEASE_S * 4 / 3 + 0.1
    await asyncio.sleep(2.0)
    after = await world.versions()
    assert all(after[p] > before[p] for p in orphans)
    assert max(learner.longest_step_s for learner in learners) < 0.15
    await end(*learners)
    await a.end()


@pytest.mark.parametrize("lasts_s", [None, 1e9, 3000.0, 2 * LEASE_S])
@in_virtual_time
async def test_a_lease_that_no_syncer_has_is_taken_over_and_the_status_names_it(lasts_s: float | None) -> None:
    """Without an end it would stop its fragment for ever, and nobody would say so. A syncer that comes finds it too."""
    world = VirtualRun(sync_spec(fragments=2, tokens=ENDLESS))
    key, learners = world.bus.keys.lease(1), learners_of(world)
    syncers = [Syncer(world, "a")]
    await until(lambda: len(syncers[-1].held) == 2, 2 * LEASE_S)
    for comes in (False, True):
        if comes:
            await syncers[-1].end()
        world.store.values[key] = b"garbage"
        world.store.expiries.pop(key, None)
        if lasts_s is not None:
            world.store.expiries[key] = world.clock.now() + lasts_s
        if comes:
            syncers.append(Syncer(world, "b"))
        else:
            await until(lambda: syncers[-1].held == {0}, LEASE_S)
        await asyncio.sleep(LEASE_S / 4)
        (said,) = [one for one in (await read_status(world.bus, world.clock))["warnings"] if "garbage" in one]
        assert said.startswith("the lease of fragments 1 is held under 'garbage', which is none of the run's syncers")
        await until(lambda: syncers[-1].held == {0, 1}, 2 * LEASE_S)
        assert "garbage" not in str((await read_status(world.bus, world.clock))["warnings"])
    await end(*learners)
    await syncers[-1].kill()


@pytest.mark.parametrize("takes_effect", slow_beyond(1, [False, True]), ids=["lost", "its answer lost"])
@pytest.mark.parametrize("method", ["acquire_lease", "announce_syncer", "read_state"])
@in_virtual_time
async def test_a_healthy_syncer_loses_no_lease_by_a_call_that_is_not_answered(method: str, takes_effect: bool) -> None:
    """Though the bus takes two lease times to say so; nor do the others ever miss the syncer."""
    assert BUS_TIMES.call_s >= 2 * LEASE_S
    world = VirtualRun(sync_spec(fragments=P, tokens=ENDLESS))
    a = Syncer(world, "a")
    learners = learners_of(world)
    await world.until_version(1)
    bus = unanswered(a)
    bus.arm(method, takes_effect)
    for _ in range(150):
        await asyncio.sleep(0.1)
        assert a.held == set(range(P))
        assert await world.bus.read_leases(range(P)) == [a.service.nonce] * P
        assert await world.bus.read_syncers() == {a.service.nonce: "a"}
    assert bus.happened
    await end(*learners)
    await a.end()


@pytest.mark.parametrize("after_s", slow_beyond(1, [0.6 * LEASE_S, 0.9 * LEASE_S]))
@pytest.mark.parametrize("method", ["acquire_lease", "announce_syncer", "read_state", "read_leases"])
@in_virtual_time
async def test_a_call_of_the_survivor_that_is_not_answered_does_not_hold_up_the_taking_over(
    method: str, after_s: float
) -> None:
    """Whichever it is, shortly before the dead syncer's leases end or just then: all are taken in two lease times."""
    _, (a, b), learners = await sharing()
    bus = unanswered(a)
    await b.kill()
    asyncio.get_running_loop().call_later(after_s, bus.arm, method, True)
    await until(lambda: a.held == set(range(P)), 2 * LEASE_S)
    await until(lambda: bus.happened, LEASE_S)
    await end(*learners)
    await a.end()


@pytest.mark.parametrize("method", ["acquire_lease", "release_lease"])
@in_virtual_time
async def test_a_call_that_is_not_answered_loses_no_merge_of_a_syncer_that_parts(method: str) -> None:
    """A merge that takes two lease times is committed, although one call about its lease, or the other's, hangs."""
    world = VirtualRun(sync_spec(fragments=2, tokens=ENDLESS))
    a = Syncer(world, "a")
    learners = learners_of(world)
    await world.until_version(1)
    bus, started = unanswered(a), asyncio.Event()

    async def merging(fragment: int) -> None:
        if fragment == 1:
            started.set()
            await asyncio.sleep(2 * LEASE_S)

    a.merging = merging
    await asyncio.wait_for(started.wait(), 5.0)
    was = (await world.versions())[1]
    bus.arm(method, False)
    async with asyncio.timeout(4 * LEASE_S):
        await a.end()
    assert bus.happened
    assert (await world.versions())[1] == was + 1
    assert a.service.metrics.registry.get_sample_value("diloco_lease_losses_total") == 0
    await nothing_left_held(world)
    await end(*learners)


@in_virtual_time
async def test_leases_that_are_only_held_for_a_while_outlast_a_call_that_is_not_answered() -> None:
    """Those of a checkpoint that is restored, and of the end of a run."""
    world = VirtualRun(sync_spec(fragments=2))
    bus = OneUnanswered(world.bus)
    for p in range(2):
        assert await bus.acquire_lease(p, "nonce", LEASE_S)
    bus.arm("acquire_lease", False)
    async with holding(bus, range(2), "nonce", LEASE_S):  # type: ignore[arg-type]  # every method of a bus
        for _ in range(150):
            await asyncio.sleep(0.1)
            assert await world.bus.read_leases(range(2)) == ["nonce"] * 2
    assert bus.happened


@in_virtual_time
async def test_leases_whose_calls_must_wait_for_their_turn_are_not_lost() -> None:
    """Eight at a time, as over Redis: 64 take longer than a call may; the next round begins with what is left."""
    world = VirtualRun(sync_spec(fragments=64, sync_interval=100, tokens=ENDLESS))
    a = Syncer(world, "a")
    turns, acquire = asyncio.Semaphore(8), a.bus.acquire_lease
    assert LEASE_S / 4 < 64 / 8 * 0.2

    async def in_turn(fragment: int, nonce: str, ttl_s: float) -> bool:
        async with turns:
            await asyncio.sleep(0.2)
            return await acquire(fragment, nonce, ttl_s)

    a.bus.acquire_lease = in_turn  # type: ignore[method-assign]
    learner = VirtualLearner("l0", world, 0.1, "a" * 16).start()
    await world.until_version(0)
    for _ in range(120):
        await asyncio.sleep(0.1)
        assert await world.bus.read_leases(range(64)) == [a.service.nonce] * 64
        assert len(a.held) == 64
    await learner.kill()
    await a.end()


@in_virtual_time
async def test_a_syncer_is_ready_when_it_merges_or_stands_by() -> None:
    """More syncers than fragments: the spare one is ready too. Who is cut off is not, nor who has no run yet."""
    world = VirtualRun(sync_spec(fragments=1, tokens=ENDLESS))
    a = Syncer(world, "a")
    await asyncio.sleep(1.0)
    assert a.service.ready() == (False, "waiting for the run's spec")
    learners = learners_of(world)
    await world.until_version(1)
    assert a.service.ready() == (True, "1 of 1 leases held")
    b = Syncer(world, "b")
    await asyncio.sleep(2 * LEASE_S)
    ((spare, serving),) = [(x, y) for x, y in ((a, b), (b, a)) if not x.held]
    assert serving.service.ready() == (True, "1 of 1 leases held")
    assert spare.service.ready() == (True, "0 of 1 leases held: standby among 2 syncers")
    await spare.bus.close()
    await asyncio.sleep(1.5 * LEASE_S)
    assert spare.service.ready() == (False, "no contact with Redis")
    assert serving.service.ready() == (True, "1 of 1 leases held")
    await asyncio.gather(*(party.kill() for party in (a, b, *learners)))


# --- ending --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_run_of_several_syncers_ends_by_itself_and_every_token_is_accounted_for() -> None:
    """All of them end, one manifest names the heads, and nothing is left on the bus."""
    world = VirtualRun(sync_spec(fragments=P, tokens=9_000, sync_interval=8))
    syncers = [Syncer(world, name) for name in "abc"]
    learners = learners_of(world, 3)
    async with asyncio.timeout(300):
        await asyncio.gather(*(s.task for s in syncers), *(one.task for one in learners if one.task))
    state = await world.bus.read_state()
    heads = await world.heads()
    assert state.phase is Phase.FINISHED
    assert [(h.version, h.digest) for h in heads] == list(state.manifest)
    check_books(world, heads, learners)
    await nothing_left(world)


@in_virtual_time
async def test_a_merge_in_hand_elsewhere_is_in_the_manifest() -> None:
    """The lead closes an overdue run while another syncer merges: that merge is committed, and then comes the end."""
    world = VirtualRun(sync_spec(fragments=2, tokens=ENDLESS), drain_s=1.0)
    syncers = [Syncer(world, "a"), Syncer(world, "b")]
    learners = learners_of(world)
    await until(lambda: [len(s.held) for s in syncers] == [1, 1], 2 * LEASE_S)
    await world.until_version(2)
    other = next(s for s in syncers if 0 not in s.held)
    (p,) = other.held
    started, phases = asyncio.Event(), []

    async def merging(fragment: int) -> None:
        if fragment == p:
            started.set()
            await asyncio.sleep(4.0)
            state = await world.bus.read_state()
            phases.append(state.phase)

    other.merging = merging
    await asyncio.wait_for(started.wait(), 5.0)
    was = (await world.versions())[p]
    await end(*learners)
    await ask_to_drain(world)
    async with asyncio.timeout(30):
        await asyncio.gather(*(s.task for s in syncers))
    state = await world.bus.read_state()
    assert phases[0] is Phase.CLOSING
    assert state.manifest == tuple((h.version, h.digest) for h in await world.heads())
    assert state.manifest[p][0] == was + 1
    await nothing_left(world)


def dies_at(syncer: Syncer, phase: Phase, after: bool) -> asyncio.Event:
    """Kill a syncer where it writes a phase, just before or just after it took effect; set when it happened."""
    died, write = asyncio.Event(), syncer.bus.write_state

    async def deadly(state: RunState) -> RunState:
        if state.phase is phase and not died.is_set():
            if after:
                await write(state)
            died.set()
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(syncer.kill()))
            await asyncio.Event().wait()
        return await write(state)

    syncer.bus.write_state = deadly  # type: ignore[method-assign]
    return died


@pytest.mark.parametrize("phase", [Phase.CLOSING, Phase.FINISHED])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@in_virtual_time
async def test_a_syncer_that_dies_while_it_ends_the_run_is_replaced_by_the_next(
    phase: Phase, after: bool, tmp_path: Path
) -> None:
    """The others, or one that is started anew, write the manifest and the last checkpoint."""
    world = VirtualRun(sync_spec(fragments=2, tokens=2_000), checkpoint_dir=tmp_path)
    syncers = [Syncer(world, "a"), Syncer(world, "b")]
    deaths = [dies_at(s, phase, after) for s in syncers]
    learners = learners_of(world)
    async with asyncio.timeout(120):
        await asyncio.gather(*(one.task for one in learners if one.task))
        await asyncio.gather(*(s.task for s in syncers), return_exceptions=True)
    assert any(death.is_set() for death in deaths)
    anew = Syncer(world, "c")
    async with asyncio.timeout(30):
        await anew.task
    state = await world.bus.read_state()
    assert state.phase is Phase.FINISHED
    assert [(h.version, h.digest) for h in await world.heads()] == list(state.manifest)
    assert load_checkpoint(tmp_path).state.manifest == state.manifest
    assert await world.bus.read_leases([0, 1]) == [None, None]


@in_virtual_time
async def test_a_syncer_that_is_started_while_the_run_closes_merges_nothing_and_refuses_the_rest() -> None:
    """However late it hears of it: it takes no lease before. Training that was offered twice is lost once, and what the
    second offer holds beyond the first is lost with it."""
    world = VirtualRun(sync_spec(fragments=2, quorum=2, tokens=ENDLESS))
    a = Syncer(world, "a")
    learner = VirtualLearner("l0", world, 0.1, "a" * 16).start()
    await world.until_version(0)
    async with asyncio.timeout(10):
        while not all([await world.bus.read_offers(p) for p in range(2)]):
            await asyncio.sleep(0.05)
    await learner.kill()
    await a.kill()
    pending = [(await world.bus.read_offers(p))[0].header for p in range(2)]
    tokens = []
    for header in pending:
        for attempt, more in ((1, 0), (2, 7)):
            later = {"attempt": header.attempt + attempt, "tokens": header.tokens + more}
            await world.bus.offer(header.model_copy(update=later))
        tokens.append(header.tokens)
    state = await world.bus.read_state()
    await world.bus.write_state(state.model_copy(update={"phase": Phase.CLOSING}))
    await asyncio.sleep(2 * LEASE_S)
    late = Syncer(world, "late")
    read_reports = late.bus.read_reports

    async def slowly() -> Any:
        await asyncio.sleep(3.0)
        return await read_reports()

    late.bus.read_reports = slowly  # type: ignore[method-assign]
    await asyncio.sleep(2.0)
    assert late.held == set()
    async with asyncio.timeout(30):
        await late.task
    state = await world.bus.read_state()
    assert state.phase is Phase.FINISHED
    assert [version for version, _ in state.manifest] == [0, 0]
    refused = [r for r in await world.tape() if isinstance(r, Rejected)]
    assert [(r.fragment, r.reason, r.lost_tokens) for r in refused] == [
        (p, RefusalReason.RUN_FINISHED, lost) for p in range(2) for lost in (tokens[p], 0, 7)
    ]
    assert [head.rejected_tokens for head in await world.heads()] == [count + 7 for count in tokens]
    await nothing_left(world)


@in_virtual_time
async def test_a_learner_that_floods_its_stream_does_not_keep_the_run_from_its_end() -> None:
    """Whatever it adds while the rest is refused stays there. The tape tells of it as far as in a window, and the head
    counts all that was refused."""
    there = TOLD_A_WINDOW + 8
    world = VirtualRun(sync_spec(fragments=1, tokens=ENDLESS))
    a = Syncer(world, "a")
    learner = VirtualLearner("l0", world, 0.1, "a" * 16).start()
    await world.until_version(1)
    await learner.kill()
    await asyncio.sleep(LEASE_S)  # what it left is merged
    await a.kill()
    sent = count()

    async def flood() -> None:
        await world.bus.offer(samples.header("flood", base_version=next(sent), tokens=10))

    for _ in range(there):
        await flood()
    state = await world.bus.read_state()
    await world.bus.write_state(state.model_copy(update={"phase": Phase.CLOSING}))
    b = Syncer(world, "b")
    refuse = b.bus.refuse

    async def in_background(*args: Any) -> None:
        if next(sent) < 10 * there:
            await flood()
        await refuse(*args)

    b.bus.refuse = in_background  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        await b.task
    state = await world.bus.read_state()
    assert state.phase is Phase.FINISHED
    told = [r.last_told for r in await world.tape() if isinstance(r, Rejected) and r.learner == "flood"]
    assert told == [False] * (TOLD_A_WINDOW - 1) + [True]
    (head,) = await world.heads()
    assert head.refused[RefusalReason.RUN_FINISHED] == there
    assert head.rejected_tokens == 10 * there
    assert [one.header.learner for one in await world.bus.read_offers(0) if one.header] == ["flood"]


@in_virtual_time
async def test_a_syncer_that_is_told_to_stop_leaves_the_end_to_the_others() -> None:
    """In the middle of the drain it gives its fragments back; the run is finished by who is left."""
    world, (a, b), learners = await sharing()
    lead, other = (a, b) if 0 in a.held else (b, a)
    await ask_to_drain(world)
    await lead.end()
    state = await world.bus.read_state()
    assert state.phase is Phase.DRAINING
    assert lead.service.in_order
    async with asyncio.timeout(60):
        await asyncio.gather(other.task, *(one.task for one in learners if one.task))
    state = await world.bus.read_state()
    assert state.phase is Phase.FINISHED
    check_books(world, await world.heads(), learners)


@pytest.mark.parametrize("skew_s", [3600.0, -3600.0])
@in_virtual_time
async def test_a_drain_takes_its_time_whatever_the_wall_clocks_say(skew_s: float) -> None:
    """A syncer whose clock is an hour ahead, or behind, leads the drain on: the deadline is met, not missed."""
    drain_s = 20.0
    world = VirtualRun(sync_spec(fragments=P, tokens=ENDLESS), drain_s=drain_s)
    first = Syncer(world, "a")
    learners = learners_of(world)
    await world.until_version(1)
    second = Syncer(world, "b", skew_s=skew_s)
    await until(lambda: bool(second.held), 2 * LEASE_S)
    ghost = asyncio.create_task(never_leaves(world))
    await ask_to_drain(world)
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(1.0)
    await first.end()
    async with asyncio.timeout(drain_s + 10.0):
        await second.task
    assert asyncio.get_running_loop().time() - began >= drain_s - 1.0
    ghost.cancel()
    await asyncio.gather(*(one.task for one in learners if one.task))
    check_books(world, await world.heads(), learners)


async def never_leaves(world: VirtualRun) -> None:
    """A learner that reports, and does not end."""
    while True:
        await world.bus.write_report(samples.report("ghost", versions=(0,) * world.spec.sync.fragments, tokens=0))
        await asyncio.sleep(1.0)


# --- what they leave on disk -----------------------------------------------------------------------------


@in_virtual_time
async def test_the_last_checkpoint_is_saved_once(tmp_path: Path) -> None:
    """Syncers that share a folder do not save the same state twice; when one is told to stop, only the lead saves."""
    world, syncers, learners = await sharing("abc", checkpoint_dir=tmp_path)
    lead = next(s for s in syncers if 0 in s.held)
    first, second = (s for s in syncers if s is not lead)
    await first.end()
    assert not saved(tmp_path)
    await lead.end()
    assert len(saved(tmp_path)) == 1
    await ask_to_drain(world)
    d = Syncer(world, "d")
    async with asyncio.timeout(60):
        await asyncio.gather(second.task, d.task, *(one.task for one in learners if one.task))
    assert len(saved(tmp_path)) == 2
    state = await world.bus.read_state()
    assert load_checkpoint(tmp_path).state == state


@in_virtual_time
async def test_no_record_of_the_tape_is_lost_with_a_syncer(tmp_path: Path) -> None:
    """Each archives all of it: whoever is killed, the folder holds every record once."""
    world = VirtualRun(sync_spec(fragments=P, tokens=5_000), tape_dir=tmp_path)
    a, b = Syncer(world, "a"), Syncer(world, "b")
    learners = learners_of(world)
    await world.until_version(3)
    lead, other = (a, b) if 0 in a.held else (b, a)
    await lead.kill()
    await asyncio.sleep(3.0)
    anew = Syncer(world, "c")
    async with asyncio.timeout(120):
        await asyncio.gather(other.task, anew.task, *(one.task for one in learners if one.task))
    archived = read_archive(tmp_path)
    assert archived == sorted(await world.tape(), key=lambda record: record.unix_s)
    assert len({path.name.split("-")[1] for path in archives(tmp_path)}) == 3


@in_virtual_time
async def test_several_syncers_may_be_told_to_resume_the_same_checkpoint(tmp_path: Path) -> None:
    """One restores it, the others wait for that and join; the run goes on from there."""
    first = VirtualRun(sync_spec(fragments=P, tokens=2_000), checkpoint_dir=tmp_path)
    a = Syncer(first, "a")
    learners = learners_of(first)
    async with asyncio.timeout(120):
        await asyncio.gather(a.task, *(one.task for one in learners if one.task))
    before = await first.versions()
    world = VirtualRun(sync_spec(fragments=P, tokens=4_000), resume=tmp_path, tokens=4_000)
    syncers = [Syncer(world, name) for name in "bcd"]
    learners = learners_of(world)
    await until(lambda: [len(s.held) for s in syncers] == [2, 2, 2], 0.8 * LEASE_S)
    installed = [r for r in await world.tape() if isinstance(r, Committed) and not r.contributions]
    assert sorted((r.fragment, r.version) for r in installed) == list(enumerate(before))
    async with asyncio.timeout(120):
        await asyncio.gather(*(s.task for s in syncers), *(one.task for one in learners if one.task))
    state = await world.bus.read_state()
    assert state.phase is Phase.FINISHED
    assert state.base_tokens >= 2_000
    assert all(now > was for now, was in zip(await world.versions(), before, strict=True))


# --- waste -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@in_virtual_time
async def test_the_recent_merged_share_outlives_the_lead() -> None:
    """Samples are in the run's state: who leads next goes on with them, and whoever looks finds the same share."""
    world = VirtualRun(sync_spec(fragments=P, tokens=ENDLESS), lease_s=LEASE_S)
    first, second = Syncer(world, "a"), Syncer(world, "b")
    learners = learners_of(world)
    await asyncio.sleep(100)
    lead, other = (first, second) if 0 in first.held else (second, first)
    await lead.kill()
    await asyncio.sleep(300)
    assert 0 in other.held
    state = await world.bus.read_state()
    times = [unix_s for unix_s, _, _ in state.samples]
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) <= SAMPLE_S + 2 * LEASE_S + 1  # one of them while nobody led
    assert times[-1] - times[0] + SAMPLE_S >= RECENT_S
    status = await read_status(world.bus, world.clock)
    share = status["merged_share"]
    assert share["recent"] == pytest.approx(share["since_start"], abs=0.1)
    assert share["recent"] > 0.5
    await other.end()
    await end(*learners)


def matrices(world: VirtualRun) -> None:
    """Each fragment of the run is one matrix of 8 x 8."""
    tensors = [samples.tensor(f"t{p}", (8, 8), p).model_copy(update={"matrix": True}) for p in range(2)]
    world.spec = Spec(sync=world.spec.sync, tensors=tuple(tensors), trainer={})


@in_virtual_time
async def test_an_outer_step_that_will_not_fit_is_said_before_it_is_first_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reckoned from the shapes and the machine's speed, while the first merges only average; in log, status, metrics.

    Once two steps were measured these count: here they take no time.
    """

    async def slow_machine(*_: Any) -> Speed:
        return Speed(flops=8 * matrix_operations(8, 8, "halley"))  # an eighth of a second a step

    monkeypatch.setattr("diloco.syncer.serving.service.speed_for", slow_machine)
    world = VirtualRun(sync_spec(tokens=ENDLESS, outer="halley", outer_momentum=0.7, outer_warmup=20), lease_s=LEASE_S)
    matrices(world)
    learners = [VirtualLearner("l0", world, 0.05).start()]  # a third of a round is 0.07 s, tau 0.1 s
    with capture_logs() as lines:
        syncer = Syncer(world, "a")
        await until(lambda: any(line["event"] == "merges_slow" for line in lines), 10)
        assert max(await world.versions()) < 20
        found = await read_status(world.bus, world.clock)
        assert found["outer_step"] == {"outer_s": 0.125, "room_s": 0.1, "share": pytest.approx(1.25)}
        assert [
            text for text in found["warnings"] if "0.1 s of it the outer step" in text and "--outer nesterov" in text
        ]
        assert gauge(syncer, "outer_share") == pytest.approx(1.25)
        assert gauge(syncer, "merge_share") > 1
        assert gauge(syncer, "outer_room") == pytest.approx(0.1)
        await world.until_version(23)
        await until(lambda: any(line["event"] == "merges_in_time" for line in lines), 10)
        assert (await read_status(world.bus, world.clock))["warnings"] == []
    await syncer.end()
    await learners[0].kill()


def gauge(syncer: Syncer, name: str) -> float:
    """What a syncer's metrics say."""
    value: float = getattr(syncer.service.metrics, name).collect()[0].samples[0].value
    return value


@in_virtual_time
async def test_slow_merges_are_logged_once_and_again_only_after_they_were_in_time() -> None:
    """A line an episode, not a line a merge; each reader of the status sees it too, and what helps."""
    world = VirtualRun(sync_spec(tokens=ENDLESS), lease_s=LEASE_S)
    syncer = Syncer(world, "a")
    slow_merges(syncer, 3.0)  # a round is 4 steps of 0.1 s
    learners = learners_of(world)
    with capture_logs() as lines:
        await asyncio.sleep(60)
        warnings = (await read_status(world.bus, world.clock))["warnings"]
        assert [text for text in warnings if "too slow" in text], warnings
        slow_merges(syncer, 0.0)
        await asyncio.sleep(60)
        assert (await read_status(world.bus, world.clock))["warnings"] == []
    told = [line["event"] for line in lines if line["event"] in ("merges_slow", "merges_in_time")]
    assert told == ["merges_slow", "merges_in_time"]
    assert sum(line["event"] == "fragment_merged" for line in lines) > 20
    await syncer.end()
    await end(*learners)
