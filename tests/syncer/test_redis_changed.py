"""That Redis failed over, or was restarted, is known afterwards: from the run's events. In virtual time."""

import asyncio

from diloco.pipeline.messages.run import REDIS_CHANGED
from diloco.pipeline.view.page.collector import Collector
from diloco.pipeline.view.status_reader import read_status
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time
from tests.virtual_run import end, under_way


@in_virtual_time
async def test_of_several_syncers_one_tells_of_another_server_and_status_and_page_say_so_for_an_hour() -> None:
    """The server comes back with the state that it had, or a replica that had it all; nothing is said before."""
    world, party = await under_way(1, learners=1)
    world.start_syncer(syncer_id="another")
    await asyncio.sleep(6)

    async def changes() -> int:
        return sum(one.name == REDIS_CHANGED for _, one in await world.bus.read_events())

    assert await changes() == 0
    for times in (1, 2):
        world.store.restart(world.store.snapshot())
        await asyncio.sleep(7)
        assert await changes() == times
    (said,) = [one for one in (await read_status(world.bus, world.clock))["warnings"] if "failed over" in one]
    assert "2 times in the last hour, last 0:" in said
    collector = Collector(world.bus, VirtualClock())
    await collector.poll()
    marks = [one["who"] for one in collector.model.snapshot()["marks"] if "failed over" in one["what"]]
    assert marks == ["Redis"] * 2
    later = await read_status(world.bus, VirtualClock(3600.0))
    assert not [one for one in later["warnings"] if "failed over" in one]
    await end(*party)
