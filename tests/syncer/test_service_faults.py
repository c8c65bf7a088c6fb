"""Faults on the way between learners, bus and syncer, in virtual time: each really happens, and the run goes on."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from diloco.pipeline.bus.commits import Commit, Refusal
from diloco.pipeline.errors import BadMessage, BusError, BusUnavailable, DilocoError, HeadMoved, NotPermitted
from diloco.pipeline.messages.fragment import RefusalReason, Rejected
from diloco.pipeline.messages.run import Phase
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.syncer.test_several_syncers import until
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec, under_way


async def rises(world: VirtualRun, within_s: float, by: int = 2) -> bool:
    """Whether every fragment goes on."""
    before = await world.versions()
    assert before
    await asyncio.sleep(within_s)
    return all(after >= was + by for after, was in zip(await world.versions(), before, strict=True))


@in_virtual_time
async def test_a_network_that_becomes_slow_slows_the_merges_and_does_not_end_them() -> None:
    """Uploads that take longer than any before lengthen the deadline instead of being refused for ever."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.5, f"{i:016x}").start() for i in range(2)]
    await world.until_version(3)
    slowed = 0
    for learner in learners:
        write = learner.bus.write_chunks

        async def slowly(key: str, *more: Any, write: Any = write) -> None:
            nonlocal slowed
            slowed += 1
            await asyncio.sleep(1.5)
            await write(key, *more)

        learner.bus.write_chunks = slowly  # type: ignore[method-assign]
    await asyncio.sleep(30.0)
    assert slowed > 4
    assert any(isinstance(r, Rejected) and r.reason is RefusalReason.UPLOAD_TIMEOUT for r in await world.tape())
    assert await rises(world, 30.0)
    assert max(learner.exchange.publishing._uploads[0].qsize() for learner in learners) <= 4
    await end(*learners)


def lose_the_window_after_a_refusal(bus: Any) -> None:
    """The syncer's first word about a window after its first refusal does not get through."""
    refuse, write, left = bus.refuse, bus.write_window, ["refusal", "loss"]

    async def refused(p: int, refusal: Refusal) -> None:
        await refuse(p, refusal)
        left[:] = left[-1:] if left else []

    async def written(*args: Any) -> None:
        if left == ["loss"]:
            left.clear()
            raise BusUnavailable("lost")
        await write(*args)

    bus.refuse, bus.write_window = refused, written


@pytest.mark.parametrize("loses", [False, True])
@in_virtual_time
async def test_a_refused_delta_is_asked_for_again_where_the_quorum_needs_it(loses: bool) -> None:
    """K = 2 of 2: one delta with a NaN does not freeze its fragment, also if the bus fails right after the refusal."""
    world = VirtualRun(sync_spec(tokens=10**9, quorum=2))
    syncer = world.start_syncer()
    if loses:
        lose_the_window_after_a_refusal(syncer.bus)
    # The second comes half a second after the first: the refusal falls into the time before the quorum.
    learners = [VirtualLearner(f"l{i}", world, 0.1 + 0.5 * i, f"{i:016x}").start() for i in range(2)]
    await world.until_version(2)
    train = learners[0].train

    def poisoned() -> None:
        train()
        learners[0].values[0][0] = np.nan

    learners[0].train = poisoned  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        while not any(isinstance(r, Rejected) and r.reason is RefusalReason.NON_FINITE for r in await world.tape()):
            await asyncio.sleep(0.01)
    learners[0].train = train  # type: ignore[method-assign]
    learners[0].values[0][0] = 0.5
    assert await rises(world, 8.0)
    await end(*learners)


def disconnect(learner: VirtualLearner) -> None:
    """Its next read of the tape fails, as when the server is restarted."""
    bus, failed = learner.bus, []
    read = bus.read_tape

    async def once(*args: Any, **more: Any) -> Any:
        if not failed:
            failed.append(True)
            raise BusUnavailable("the server went away")
        return await read(*args, **more)

    bus.read_tape = once  # type: ignore[method-assign]


@in_virtual_time
async def test_headers_lost_with_the_bus_are_offered_again() -> None:
    """The bus comes back without headers it had acknowledged; nobody is due again, and yet it goes on."""
    world, learners = await under_way(2, quorum=2)
    for learner in learners:
        write = learner.bus.write_chunks

        async def slowly(*args: Any, write: Any = write) -> None:
            await asyncio.sleep(0.4)
            await write(*args)

        learner.bus.write_chunks = slowly  # type: ignore[method-assign]
    headers = [world.store.stream(world.bus.keys.deltas(0, f"l{i}")) for i in range(2)]
    saved = world.store.snapshot()
    async with asyncio.timeout(30):
        while sum(len(stream.ids) for stream in headers) < 2:
            if not any(stream.ids for stream in headers):
                saved = world.store.snapshot()
            await asyncio.sleep(0.001)
    await world.kill_syncer()  # its memory would save the day: what the learners do is what is tested
    world.store.restart(saved)
    for learner in learners:
        disconnect(learner)
    world.start_syncer()
    assert await rises(world, 16.0)
    await end(*learners)


@in_virtual_time
async def test_leaving_ends_within_its_budget_while_the_bus_is_away() -> None:
    """No exception reaches the user's program; the leave is not called orderly."""
    _, (learner,) = await under_way(2, learners=1)

    async def away(*_: Any) -> Any:
        raise BusUnavailable("gone")

    for name in ("write_report", "finish_shard", "offer", "add_event"):
        setattr(learner.bus, name, away)
    learner.exchange.claims.finish("1-0")
    async with asyncio.timeout(30):
        assert not await learner.exchange.leave(3.0)
    await learner.kill()


@in_virtual_time
async def test_a_commit_that_is_always_refused_is_not_made_again_at_once() -> None:
    """A head that is not what it was read as (a damaged payload, say) has the owner wait longer and longer."""
    world, (learner,) = await under_way(2, learners=1)
    service = world.service
    commit, refused = service.bus.commit, 0

    async def refuses(_: Commit) -> None:
        nonlocal refused
        refused += 1
        assert refused < 100, "without a pause"
        raise HeadMoved("the head is another one")

    service.bus.commit = refuses  # type: ignore[method-assign]
    await asyncio.sleep(20.0)
    assert 10 < refused < 40
    service.bus.commit = commit  # type: ignore[method-assign]
    assert await rises(world, 6.0)
    await learner.kill()


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (BusError("Redis refuses the command", said="ERR of a proxy"), False),
        (BadMessage("Redis holds a value of the wrong type there"), False),
        (NotPermitted("Redis does not let the syncer do that"), True),
    ],
    ids=["an unknown error", "a wrong type", "a right that is missing"],
)
@in_virtual_time
async def test_an_error_of_one_call_ends_a_syncer_only_where_a_person_has_to_mend_it(
    error: DilocoError, ends: bool
) -> None:
    """Whatever else Redis, or a proxy before it, answers: the fragment is loaded again, and all others go on."""
    world, (learner,) = await under_way(2, learners=1)
    service = world.service
    commit, answered = service.bus.commit, 0

    async def answers(what: Commit) -> None:
        nonlocal answered
        answered += 1
        if answered == 1:
            raise error
        await commit(what)

    service.bus.commit = answers  # type: ignore[method-assign]
    goes_on = await rises(world, 6.0)
    assert (answered >= 1, goes_on) == (True, not ends)
    if ends:
        with pytest.raises(type(error)):
            await world.syncer
    await learner.kill()


@in_virtual_time
async def test_a_window_that_was_open_before_a_rewind_is_said_to_be_open_again() -> None:
    """The rewind closes it on the bus; an owner that took it for open still would not say so when it opens."""
    world = VirtualRun(sync_spec(tokens=10**9, quorum=2))
    service = world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.1 + 0.1 * i, f"{i:016x}").start() for i in range(2)]
    await world.until_version(2)
    async with asyncio.timeout(10):
        while (head := (await world.heads())[0]).window.state == "idle":
            await asyncio.sleep(0.001)
    saved = world.store.snapshot()
    async with asyncio.timeout(2):
        while (await world.heads())[0].version == head.version:
            await asyncio.sleep(0.01)
    world.syncer.cancel()
    for task in (world.syncer, *(learner.task for learner in learners if learner.task)):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    world.store.restart(saved)
    assert await service.bus.acquire_lease(0, service.nonce, 5.0)
    loaded = await service.owners[0].load()
    assert loaded.head.window == (await world.heads())[0].window
    assert any(record.kind == "rewound" for record in await world.tape())
    assert service.metrics.registry.get_sample_value("diloco_rewinds_total") == 1


@in_virtual_time
async def test_an_owner_that_cannot_read_any_more_decides_nothing_by_what_it_read_before() -> None:
    """A rewind may have taken it. Headers come and the bus goes while a window is being written."""
    world = VirtualRun(sync_spec(tokens=10**9, quorum=2, fragments=1))
    service = world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.1 + 0.03 * i, f"{i:016x}").start() for i in range(2)]
    await world.until_version(2)
    bus, done, gone = service.bus, list[str](), asyncio.Event()
    read_offers, write_window, read_heads = bus.read_offers, bus.write_window, bus.read_heads

    async def read(*args: Any, **more: Any) -> Any:
        found = asyncio.ensure_future(read_offers(*args, **more))
        away = asyncio.ensure_future(gone.wait())
        await asyncio.wait({found, away}, return_when=asyncio.FIRST_COMPLETED)
        if gone.is_set():
            raise BusUnavailable("the server went away")
        return await found

    async def slowly(fragment: int, nonce: str, expected: Any, window: Any, record: Any) -> None:
        done.append(window.state)
        if done.count("collecting") == 1 and window.state == "collecting":
            arrived = len(await read_offers(0))
            while len(await read_offers(0)) == arrived:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.001)
            gone.set()
            await asyncio.sleep(0.1)
        await write_window(fragment, nonce, expected, window, record)

    async def heads(fragments: Any) -> Any:
        if gone.is_set():  # else somebody looks at how far the run is
            done.append("heads")
            gone.clear()
        return await read_heads(fragments)

    bus.read_offers, bus.read_heads = read, heads  # type: ignore[assignment,method-assign]
    bus.write_window = slowly  # type: ignore[method-assign]
    await until(lambda: "heads" in done, 10)
    first = done.index("collecting")
    assert done[first : first + 2] == ["collecting", "heads"]
    assert await rises(world, 6.0)
    await end(*learners)


@in_virtual_time
async def test_an_outage_in_the_drain_takes_nobody_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus is away for longer than the liveness time, before anybody could leave: all last deltas are merged.

    The syncer finds it again before the learners do, who wait up to two seconds between two tries.
    """
    world = VirtualRun(sync_spec(tokens=10**9), drain_s=60.0)
    service = world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    await world.until_version(2)
    parties = {service.bus, *(learner.bus for learner in learners)}
    away, refused, turn = set(parties), set[Any](), MemoryBus._turn

    async def gone(bus: MemoryBus) -> None:
        if bus in away:
            refused.add(bus)
            raise BusUnavailable("the server is away")
        await turn(bus)

    monkeypatch.setattr(MemoryBus, "_turn", gone)
    state = await world.bus.read_state()
    await world.bus.write_state(state.model_copy(update={"phase": Phase.DRAINING}))
    await asyncio.sleep(service.settings.liveness_s + 7.0)
    assert refused == parties
    away.remove(service.bus)
    await asyncio.sleep(2.0)
    away.clear()
    was = await world.versions()
    await world.finish(*learners)
    assert all(after > before for after, before in zip(await world.versions(), was, strict=True))
    assert [await world.bus.read_offers(p) for p in range(2)] == [[], []]


@in_virtual_time
async def test_only_outages_after_joining_count_in_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before lost no training; a count that is not 0 would excuse every later gap of the ledger as a fault's."""
    world, propose, refused = VirtualRun(sync_spec(tokens=10**9)), MemoryBus.propose_spec, []

    async def once(self: MemoryBus, data: bytes) -> bytes:
        if not refused:
            refused.append(True)
            raise BusUnavailable("not there yet")
        return await propose(self, data)

    monkeypatch.setattr(MemoryBus, "propose_spec", once)
    world.start_syncer()
    learner = VirtualLearner("l", world).start()
    await world.until_version(2)
    assert refused
    (seen,) = await world.bus.read_reports()
    assert seen.report.outages == 0
    monkeypatch.setattr(learner.bus, "read_tape", AsyncMock(side_effect=BusUnavailable("away")))
    await asyncio.sleep(5)
    (seen,) = await world.bus.read_reports()
    assert seen.report.outages > 0
    await learner.kill()
