"""A key has what no party writes, for a time: the run goes on once it is gone. In virtual time."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from diloco.pipeline.errors import BadMessage
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.times import TIMES
from diloco.tape import read_archive
from diloco.workers.exchange.redis_access import read_run
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec, under_way


def another_kind(world: VirtualRun, key: str) -> Callable[[], None]:
    """A value of another type in a key's place; call the answer to have it deleted."""
    world.store.delete(key)
    world.store.values[key] = b"x"
    return lambda: world.store.delete(key)


def unreadable_state(world: VirtualRun, key: str) -> Callable[[], None]:
    world.store.hset(key, {"blob": b"garbage"})
    return lambda: world.store.delete(key)


async def goes_on(world: VirtualRun, fragment: int, seconds: float) -> int:
    """The fragment's version after that time: it has risen by five or more."""
    (before,) = await world.bus.read_heads([fragment])
    await asyncio.sleep(seconds)
    (after,) = await world.bus.read_heads([fragment])
    assert before
    assert after
    assert after.version >= before.version + 5
    return after.version


DAMAGES = {
    "senders of another kind": (another_kind, lambda keys: keys.senders(0)),
    "arrivals of another kind": (another_kind, lambda keys: keys.arrivals(0)),
    "state of another kind": (another_kind, lambda keys: keys.state),
    "unreadable state": (unreadable_state, lambda keys: keys.state),
}


@pytest.mark.parametrize("seconds", [0.5, 12.0])
@pytest.mark.parametrize("damage", DAMAGES)
@in_virtual_time
async def test_what_was_to_be_offered_meanwhile_is_offered_once_the_key_is_gone(damage: str, seconds: float) -> None:
    """A learner that gives it up waits for a merge that nobody makes: what it made was offered, by its books."""
    does, key = DAMAGES[damage]
    world, party = await under_way(2, quorum=2)
    mended = does(world, key(world.bus.keys))
    await asyncio.sleep(seconds)
    mended()
    await asyncio.sleep(3.0)
    versions = await world.versions()
    await world.until_version(max(versions) + 2, 10.0)
    await end(*party)


@in_virtual_time
async def test_one_unreadable_head_holds_up_its_fragment_alone_and_is_put_back_once_it_is_deleted() -> None:
    world, party = await under_way(2, quorum=2)
    key = world.bus.keys.head(1)
    del world.store.values[key][b"digest"]
    with pytest.raises(BadMessage, match="head of fragment 1 is unreadable"):
        await world.heads()
    version = await goes_on(world, 0, 10.0)
    status = await read_status(world.bus, world.clock)
    assert [one for one in status["warnings"] if "head of fragment 1 is unreadable" in one]
    assert status["phase"] == Phase.RUNNING.value
    world.store.delete(key)
    await world.until_version(version, 60.0)
    await end(*party)


@in_virtual_time
async def test_an_unreadable_spec_is_named_by_its_key() -> None:
    """To the status and to whoever joins, with what to do."""
    bus = MemoryBus("run", VirtualClock())
    bus.store.values[bus.keys.spec] = b"garbage"
    named = re.escape(f"the run's spec is unreadable; delete it (UNLINK '{bus.keys.spec}')")
    for read in (read_status(bus, bus.clock), read_run(bus)):
        with pytest.raises(BadMessage, match=named):
            await read


@in_virtual_time
async def test_a_stream_of_another_kind_holds_up_its_fragment_alone() -> None:
    world, party = await under_way(2, quorum=1)
    mended = another_kind(world, world.bus.keys.deltas(0, "l0"))
    version = await goes_on(world, 1, 10.0)
    mended()
    await world.until_version(version + 2, 60.0)
    await end(*party)


@in_virtual_time
async def test_a_syncer_that_comes_takes_the_fragments_whose_heads_can_be_read() -> None:
    world, party = await under_way(2, quorum=2)
    await world.kill_syncer()
    key = world.bus.keys.head(1)
    digest = world.store.values[key].pop(b"digest")
    world.start_syncer(syncer_id="another")
    version = await goes_on(world, 0, 30.0)
    world.store.values[key][b"digest"] = digest
    await world.until_version(version, 60.0)
    await end(*party)


@in_virtual_time
async def test_an_unreadable_tape_entry_is_skipped_by_all_readers(tmp_path: Path) -> None:
    """More of them in a row than one read returns, too: the run merges on, is archived, and ends."""
    world = VirtualRun(sync_spec(tokens=10**9), tape_dir=tmp_path)
    world.start_syncer()
    learner = VirtualLearner("l0", world, 0.1, f"{0:016x}").start()
    await world.until_version(3)
    for _ in range(1001):
        world.bus._xadd(world.bus.keys.tape(0), b"bogus")
    await world.until_version(6)
    await end(learner)
    await world.stop_syncer()
    assert world.service.in_order
    tape = await world.tape()
    assert max(record.version for record in tape if isinstance(record, Committed)) >= 6
    assert read_archive(tmp_path) == tape


@in_virtual_time
async def test_a_syncer_ends_even_if_its_tape_cannot_be_read(tmp_path: Path) -> None:
    """It says that the archive lacks the tape's end, and its status is 1."""
    world = VirtualRun(sync_spec(tokens=10**9), tape_dir=tmp_path)
    world.start_syncer()
    learner = VirtualLearner("l0", world, 0.1, f"{0:016x}").start()
    await world.until_version(3)
    another_kind(world, world.bus.keys.tape(0))
    await asyncio.sleep(2 * TIMES.retry_s)
    assert any("cannot be archived" in one for one in (await world.service.status())["warnings"])
    with structlog.testing.capture_logs() as lines:
        await asyncio.wait_for(world.stop_syncer(), 10.0)
    assert not world.service.in_order
    assert "tape_not_archived" in [line["event"] for line in lines]
    assert "shutdown_overrun" not in [line["event"] for line in lines]
    await end(learner)
