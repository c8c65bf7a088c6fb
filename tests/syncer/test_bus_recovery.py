"""What the bus has lost is put back by who still knows it, or is said. In virtual time."""

import asyncio
import copy
import random
from pathlib import Path

import numpy as np
import pytest

from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusUnavailable, RunReplaced, SpecMismatch
from diloco.pipeline.messages.fragment import Committed, Rewound
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import decode, encode
from diloco.pipeline.transfer.globals import pull_state
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.context import AgreedSpec
from diloco.syncer.replay.replay import replay
from diloco.syncer.serving import bus_recovery
from diloco.syncer.serving.bus_recovery import BusRestorer
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time, inline
from tests import samples, slow_beyond
from tests.virtual_run import VirtualLearner, VirtualRun, end, spec_of, sync_spec, under_way

CODECS = ("fp32", "bf16")


def learners(world: VirtualRun, count: int = 2) -> list[VirtualLearner]:
    return [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(count)]


async def rises(world: VirtualRun, within_s: float = 20.0, by: int = 2) -> None:
    """Every fragment goes on."""
    before = await world.versions()
    assert len(before) == world.spec.sync.fragments
    await world.until_version(max(before) + by, within_s)


def flush(world: VirtualRun) -> None:
    """As FLUSHALL: the server stays up, and so do all connections."""
    for key in list(world.store.values):
        world.store.delete(key)
    world.store.expiries.clear()


@pytest.mark.parametrize("codec", CODECS)
@in_virtual_time
async def test_a_bus_that_is_emptied_has_the_run_again_as_it_was(codec: str) -> None:
    """Versions, values, momentum, merged bases, totals, state, spec: all as before, and merges go on."""
    sync = sync_spec(tokens=10**9, quorum=2, global_codec=codec, outer_momentum=0.5)
    world = VirtualRun(sync)
    world.start_syncer()
    party = learners(world)
    await world.until_version(4)
    before = await world.heads()
    elements = [len(values) for values in party[0].values]
    states = [await pull_state(world.bus, h, elements[h.fragment], sync, inline) for h in before]
    state = await world.bus.read_state()
    flush(world)
    async with asyncio.timeout(5):
        while len(after := await world.heads()) < 2:
            await asyncio.sleep(0.01)
    for was, now in zip(before, after, strict=True):
        if (now.version, now.digest) != (was.version, was.digest):
            assert now.version > was.version, "a merge was under way: it is kept"
            continue
        theta, momentum = await pull_state(world.bus, now, elements[now.fragment], sync, inline)
        np.testing.assert_array_equal(theta, states[now.fragment][0])
        np.testing.assert_array_equal(momentum, states[now.fragment][1])
        assert (now.merged_tokens, now.merged_deltas) == (was.merged_tokens, was.merged_deltas)
        assert now.previous_digest == was.previous_digest
    assert await world.bus.read_spec() == encode(world.spec)
    again = await world.bus.read_state()
    assert again.started_unix_s == state.started_unix_s
    assert again.tokens >= state.tokens
    assert any(isinstance(record, Rewound) for record in await world.tape()), "the tape says so"
    await rises(world)
    await end(*party)


@in_virtual_time
async def test_a_wish_to_finish_that_the_bus_loses_is_put_back() -> None:
    """As a failover may do: learners may have left for it, and nobody would ask again."""
    world, party = await under_way(4, quorum=2)
    before = copy.deepcopy(world.store.values[world.bus.keys.state])
    state = await world.bus.read_state()
    await world.bus.write_state(state.model_copy(update={"phase": Phase.DRAINING, "reason": "asked"}))
    await asyncio.sleep(0.3)
    world.store.values[world.bus.keys.state] = before
    await asyncio.sleep(0.3)
    again = await world.bus.read_state()
    assert (again.phase.rank >= Phase.DRAINING.rank, again.reason) == (True, "asked")
    async with asyncio.timeout(30):
        while (await world.bus.read_state()).phase is not Phase.FINISHED:
            await asyncio.sleep(0.1)
    await end(*party)


@in_virtual_time
async def test_a_run_that_was_extended_is_not_ended_by_a_syncer_that_was_away() -> None:
    """It last saw the run drain, to a smaller budget."""
    world, party = await under_way(4, quorum=2)
    state = await world.bus.read_state()
    known = state.model_copy(update={"phase": Phase.DRAINING, "budget_tokens": state.budget_tokens - 1})
    agreed = AgreedSpec(world.bus, world.spec)
    assert await BusRestorer(world.bus, VirtualClock(), agreed, []).state(state, known) == state
    assert (await world.bus.read_state()).phase is Phase.RUNNING
    await end(*party)


@pytest.mark.parametrize("codec", CODECS)
@in_virtual_time
async def test_one_head_that_is_deleted_is_put_back_with_the_payloads_that_are_there(codec: str) -> None:
    """Nothing is uploaded again, nothing is left behind, and the fragment goes on."""
    world, party = await under_way(4, quorum=2, global_codec=codec, outer_momentum=0.5)
    was = (await world.heads())[0]
    world.store.delete(world.bus.keys.head(0))
    async with asyncio.timeout(15):
        while (await world.bus.read_heads([0]))[0] is None:
            await asyncio.sleep(0.01)
    (now,) = await world.bus.read_heads([0])
    if now.version == was.version:
        assert (now.digest, now.payload, now.momentum) == (was.digest, was.payload, was.momentum)
    await rises(world)
    await end(*party)


@in_virtual_time
async def test_without_the_syncer_that_knew_them_learners_bring_the_heads_back() -> None:
    """Syncer and bus lose all at once: the run begins again with what was trained, and says so."""
    world, party = await under_way(5)
    trained = min(float(values.min()) for values in party[0].values)
    await world.kill_syncer()
    flush(world)
    await asyncio.sleep(1.0)
    world.start_syncer()
    newcomer = VirtualLearner("new", world, 0.1, "e" * 16).start()
    await asyncio.sleep(1.0)  # it waits for those that have trained
    assert min(float(values.min()) for values in newcomer.values) == 0.0, "it had nothing to offer"
    await world.until_version(0, 40)
    await world.until_version(2)
    assert min(float(values.min()) for values in party[0].values) > trained > 0.1
    assert any(isinstance(record, Rewound) for record in await world.tape())
    await end(*party, newcomer)


@pytest.mark.parametrize("seed", slow_beyond(1, range(6)))
@in_virtual_time
async def test_two_syncers_keep_their_fragments_when_the_bus_was_away_for_long_and_comes_back_empty(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their leases have lapsed: a fragment falls to the one that remembers it, not to the one that is quicker."""
    world = VirtualRun(sync_spec(tokens=10**9, fragments=4, outer_momentum=0.5))
    world.start_syncer(syncer_id="a")
    party = learners(world)
    await world.until_version(4)
    world.start_syncer(syncer_id="b")
    await asyncio.sleep(20 + 0.37 * seed)
    before = await world.versions()

    async def away(_: MemoryBus) -> None:
        await asyncio.sleep(0.05)
        raise BusUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryBus, "_turn", away)
        await asyncio.sleep(10.0)
        flush(world)
    async with asyncio.timeout(30):
        while len(after := await world.versions()) < 4:
            await asyncio.sleep(0.1)
    assert all(now >= was for now, was in zip(after, before, strict=True)), (before, after)
    await rises(world, 40.0)
    await end(*party)


@pytest.mark.parametrize(("syncers", "away_s"), [(2, 0.0), (3, 0.0), (3, 7.0)])
@pytest.mark.parametrize("seed", slow_beyond(1, range(3)))
@in_virtual_time
async def test_no_head_is_lost_while_those_who_served_it_live(
    syncers: int, away_s: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emptied at any moment, on a bus with latency, with syncers that came one after the other."""
    chance = random.Random(seed)
    world = VirtualRun(sync_spec(tokens=10**9, fragments=4))
    for number in range(syncers):
        world.start_syncer(syncer_id=f"s{number}")
        await asyncio.sleep(chance.uniform(0, 1.6))
    party = learners(world)
    turn, away = MemoryBus._turn, False

    async def slow(bus: MemoryBus) -> None:
        await asyncio.sleep(chance.uniform(0, 0.02))
        if away:
            raise BusUnavailable("refused")
        await turn(bus)

    monkeypatch.setattr(MemoryBus, "_turn", slow)
    await world.until_version(4, 200)
    await asyncio.sleep(chance.uniform(5, 10))
    away = away_s > 0
    await asyncio.sleep(away_s)
    flush(world)
    away = False
    await asyncio.sleep(22.0)
    assert len(await world.versions()) == 4
    lost = [r for r in await world.tape() if isinstance(r, Rewound) and r.version < r.was_version]
    assert lost == []
    await end(*party)


@in_virtual_time
async def test_another_runs_redis_that_comes_in_the_place_of_ours_is_left_as_it_is() -> None:
    """Its spec, heads and reports stay; our syncer ends, and says why."""
    theirs = VirtualRun(sync_spec(tokens=10**9, sync_interval=8))
    theirs.start_syncer()
    party = [VirtualLearner(f"t{i}", theirs, 0.1, f"{i + 9:016x}").start() for i in range(2)]
    await theirs.until_version(3)
    await end(*party)
    await theirs.kill_syncer()
    ours = VirtualRun(sync_spec(tokens=10**9))
    ours.start_syncer()
    mine = learners(ours)
    await ours.until_version(6)
    flush(ours)
    for key, value in theirs.store.values.items():
        if "lease" not in str(key) and "syncers" not in str(key):
            ours.store.values[key] = copy.deepcopy(value)
    heads = [(head.version, head.digest) for head in await ours.heads()]
    with pytest.raises(RunReplaced, match="another run has begun under the name"):
        async with asyncio.timeout(60):
            await ours.syncer
    assert await ours.bus.read_spec() == encode(theirs.spec)
    assert [(head.version, head.digest) for head in await ours.heads()] == heads
    for one in mine:
        with pytest.raises(ExceptionGroup) as ended:
            await one.task
        assert ended.group_contains(RunReplaced, match=f"Learner {one.name} has version")


@pytest.mark.parametrize("trained", [False, True])
@in_virtual_time
async def test_a_run_that_had_merged_nothing_makes_room_for_the_one_that_begins_in_its_place(trained: bool) -> None:
    """A failover lost its first state, and a syncer that was cut off has seen that; it goes on with the next one."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    party = learners(world) if trained else [VirtualLearner("l0", world, 1e9, f"{0:016x}").start()]
    await asyncio.sleep(40.0)
    state = await world.bus.read_state()
    assert state.has_merged is trained
    await end(*party)
    world.store.delete(world.bus.keys.state)
    await world.bus.write_state(state.model_copy(update={"started_unix_s": state.started_unix_s + 9.0}))
    await asyncio.sleep(5.0)
    assert world.syncer.done() is trained
    if not trained:
        world.syncer.cancel()
    with pytest.raises(RunReplaced if trained else asyncio.CancelledError):
        await world.syncer


@in_virtual_time
async def test_reports_that_claim_more_than_can_be_counted_stop_nobody() -> None:
    """The run ends, at its budget, in order."""
    world, party = await under_way(3)
    for number in range(3):
        await world.bus.write_report(samples.report(f"forger{number}", tokens=2**62, versions=(0, 0)))
    async with asyncio.timeout(120):
        await asyncio.gather(world.syncer, *(one.task for one in party))
    state = await world.bus.read_state()
    assert state.phase.value == "finished"
    assert state.tokens == 2**62


@pytest.mark.parametrize("versions", [(0, 0), (7, 7)])
@in_virtual_time
async def test_nobodys_word_keeps_a_run_from_beginning(versions: tuple[int, ...]) -> None:
    """A learner that says it has trained, where nothing was, is waited for as long as one that has would need."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    liar = samples.report("liar", versions=versions)

    async def lie() -> None:
        number = 0
        while True:
            number += 1
            await world.bus.write_report(liar.model_copy(update={"number": number}))
            await asyncio.sleep(0.3)

    lying = asyncio.create_task(lie())
    await asyncio.sleep(1.0)
    party = learners(world)
    await world.until_version(1, 120.0)
    lying.cancel()
    await end(*party)


@in_virtual_time
async def test_a_spec_that_cannot_be_read_is_replaced_by_the_runs_own() -> None:
    """Junk that somebody put there after the bus was emptied keeps nobody out for ever."""
    world, party = await under_way(3)
    world.store.delete(world.bus.keys.spec)
    await world.bus.propose_spec(b"\xc1junk")
    await asyncio.sleep(20.0)
    assert await world.bus.read_spec() == encode(world.spec)
    await rises(world)
    await end(*party)


@in_virtual_time
async def test_reports_are_put_back_once_and_as_old_as_they_are() -> None:
    """Who is long gone does not count as live again, and what cannot be put back is not tried for ever."""
    world, party = await under_way(3, learners=3, quorum=1)
    service = world.service
    await party[2].kill()
    await asyncio.sleep(30.0)
    put_back = service.bus.put_back_report
    calls = []

    async def counted(seen):
        calls.append(seen.report.learner)
        await put_back(seen)

    service.bus.put_back_report = counted
    flush(world)
    await asyncio.sleep(3.0)
    seen = {one.report.learner: one for one in await world.bus.read_reports()}
    assert 30 <= seen["l2"].age_s < 40
    assert calls.count("l2") == 1
    world.store.delete(world.bus.keys.learners)
    world.store.hset(world.bus.keys.learners, {f"l2/{seen['l2'].report.incarnation}": b"\xc1"})
    await asyncio.sleep(20.0)
    assert calls.count("l2") == 2
    await end(*party[:2])


@pytest.mark.parametrize(
    "name", ["state", "learners", "seen", "syncers", "events", "shards", "shard_positions", "shard_epoch", "spec"]
)
@in_virtual_time
async def test_a_key_of_the_run_that_is_deleted_freezes_nothing(name: str) -> None:
    """The run merges on to its end, with every token counted."""
    world = VirtualRun(sync_spec(tokens=6000, quorum=2))
    world.start_syncer()
    party = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}", data=(40, 4)).start() for i in range(2)]
    await world.until_version(3)
    world.store.delete(getattr(world.bus.keys, name))
    await rises(world)
    await world.finish(*party)
    state = await world.bus.read_state()
    assert state.phase.value == "finished"
    assert state.tokens >= sum(learner.rounds.tokens for learner in party)
    assert await world.bus.read_spec() == encode(world.spec)


@pytest.mark.parametrize("name", ["lease", "tape", "senders", "arrivals", "deltas"])
@in_virtual_time
async def test_a_key_of_a_fragment_that_is_deleted_freezes_nothing(name: str) -> None:
    """The fragment merges on."""
    world, party = await under_way(3, quorum=2)
    keys = world.bus.keys
    for _ in range(20):
        args = {"deltas": (0, "l0")}.get(name, (0,))
        world.store.delete(getattr(keys, name)(*args))
        await asyncio.sleep(0.37)
    await rises(world)
    await end(*party)


@in_virtual_time
async def test_reports_of_those_who_left_are_put_back_so_that_their_tokens_count() -> None:
    """The count of trained tokens neither falls nor stands still when the bus has lost the reports."""
    world, party = await under_way(5)
    party[0].stop = True
    await party[0].task
    await asyncio.sleep(1.0)
    flush(world)
    await asyncio.sleep(2.0)
    names = {seen.report.learner for seen in await world.bus.read_reports()}
    assert names == {"l0", "l1"}
    state = await world.bus.read_state()
    assert abs(state.tokens - sum(one.rounds.tokens for one in party)) <= 100
    await end(*party)


@in_virtual_time
async def test_a_lost_data_queue_goes_back_to_the_epoch_under_way_and_no_further() -> None:
    """No epoch is begun anew that was read before."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    reader = VirtualLearner("l0", world, 0.1, "0" * 16, data=(40, 4)).start()
    async with asyncio.timeout(60):
        while not reader.read or reader.read[-1][0] < 3:
            await asyncio.sleep(0.1)
    flush(world)
    at = len(reader.read)
    await asyncio.sleep(20.0)
    assert min(epoch for epoch, _ in reader.read[at:]) >= 3
    last = max(epoch for epoch, _ in reader.read)
    for epoch in range(last):
        assert {block for e, block in reader.read if e == epoch} == set(range(40)), "all of it was read"
    await end(reader)


@in_virtual_time
async def test_a_recorded_run_whose_bus_was_emptied_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    """Versions that were put back join the history before to the one after."""
    world = VirtualRun(sync_spec(tokens=6000, quorum=2, outer_momentum=0.5), record_deltas=tmp_path)
    world.start_syncer()
    party = learners(world)
    await world.until_version(4)
    tape = await world.tape()
    flush(world)
    await world.finish(*party)
    tape += await world.tape()
    commits = [record for record in tape if isinstance(record, Committed)]
    outcome = replay(tmp_path, commits, lambda merges: None)
    assert outcome.differences == []
    assert outcome.repeated == outcome.merges > 10


# --- the spec ----------------------------------------------------------------------------------------


def other_spec() -> Spec:
    return spec_of(sync_spec(tokens=10**9, sync_interval=8))


class Newcomer(VirtualLearner):
    """With other settings."""

    async def live(self) -> None:
        self.world = type("Other", (), {"spec": other_spec(), "clock": self.world.clock, "store": self.world.store})()
        await super().live()


@in_virtual_time
async def test_the_run_puts_its_spec_back_and_the_newcomer_with_another_one_is_refused() -> None:
    """An emptied bus is first found by somebody with other settings: who served the run says what it is."""
    world, party = await under_way(3)
    before = await world.versions()
    flush(world)
    assert await world.bus.propose_spec(encode(other_spec())) == encode(other_spec())
    newcomer = Newcomer("new", world, 0.1, "e" * 16).start()
    with pytest.raises(SpecMismatch, match=r"sync\.sync_interval: here 8, the run has 4"):
        async with asyncio.timeout(40):
            await newcomer.task
    assert decode(Spec, await world.bus.read_spec()) == world.spec
    await asyncio.sleep(5.0)
    assert all(now > was for now, was in zip(await world.versions(), before, strict=True))
    await end(*party)


@in_virtual_time
async def test_without_a_syncer_the_first_spec_stands_and_learners_of_the_old_one_stop() -> None:
    """They say what differs, instead of training on in a run that is no more."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    (learner,) = learners(world, 1)
    await world.until_version(2)
    await world.kill_syncer()
    flush(world)
    await world.bus.propose_spec(encode(other_spec()))
    await asyncio.sleep(60.0)
    learner.stop = True
    with pytest.raises(ExceptionGroup) as caught:
        await learner.task
    assert caught.group_contains(SpecMismatch, match="sync_interval: here 4, the run has 8")
    assert decode(Spec, await world.bus.read_spec()) == other_spec()


@in_virtual_time
async def test_a_syncer_that_finds_another_run_under_its_name_stops_and_says_what_differs() -> None:
    """It was away while a run with other settings began: it takes nothing from it."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    await asyncio.sleep(0.1)
    await world.bus.propose_spec(encode(world.spec))
    await asyncio.sleep(2.0)
    flush(world)
    await world.bus.propose_spec(encode(other_spec()))
    async with asyncio.timeout(60):
        with pytest.raises(SpecMismatch, match="another run was started"):
            await world.syncer


# --- the status --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["heads", "spec"])
@in_virtual_time
async def test_the_status_of_a_run_whose_heads_or_spec_are_gone_says_so_and_what_to_do(what: str) -> None:
    """It does not say `running` as if all were well."""
    world, party = await under_way(2)
    assert not (await read_status(world.bus, world.clock))["warnings"]
    await world.kill_syncer()
    keys = world.bus.keys
    for key in (keys.head(0), keys.head(1)) if what == "heads" else (keys.spec,):
        world.store.delete(key)
    status = await read_status(world.bus, world.clock)
    assert any(f"{what}" in one and "diloco syncer" in one for one in status["warnings"]), status["warnings"]
    assert status["phase"] != "running"
    await end(*party)


@in_virtual_time
async def test_reports_that_were_too_many_are_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A syncer remembers reports for a bus that loses them. Those that were left out would come again for ever."""
    monkeypatch.setattr(bus_recovery, "REPORTS_LEFT", 3)
    bus = MemoryBus("run", LoopClock())
    memory = bus_recovery.BusRestorer(bus, LoopClock(), AgreedSpec(bus, samples.spec()), ())
    for name in ("a", "b", "c", "d"):
        await bus.write_report(samples.report(name))
    made_up = encode(samples.report("x"))  # not in the place of its own
    bus.store.hset(bus.keys.learners, {"elsewhere": made_up})
    bus.store.hset(bus.keys.seen, {"elsewhere": b"1"})
    await memory.reports(await bus.read_reports())
    for gone, then in (("d", ["a", "b", "c"]), ("c", ["a", "b", "c"])):  # three are as many as are left of too many
        del bus._hash(bus.keys.learners)[f"{gone}/{'0' * 8}".encode()]
        await memory.reports(await bus.read_reports())
        assert [seen.report.learner for seen in await bus.read_reports()] == then
