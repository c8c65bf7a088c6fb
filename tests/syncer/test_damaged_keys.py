"""A key has what no party writes, for a time: the run goes on once it is gone. In virtual time."""

import asyncio
from collections.abc import Callable

import pytest

from diloco.pipeline.errors import BadMessage
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.view.status_reader import read_status
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import VirtualRun, end, under_way


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
