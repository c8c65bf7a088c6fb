"""When a learner says that no syncer is there."""

import asyncio
from typing import Any

import structlog

from diloco.pipeline.errors import BusFull
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import end, under_way


@in_virtual_time
async def test_that_no_syncer_is_there_is_not_said_while_redis_refuses_writes_but_within_half_a_minute_after() -> None:
    """While nobody can write, none can say that it is there."""

    def said() -> int:
        return sum(one["event"] == "no_syncer" and one["learner"] == "l0" for one in logs)

    async def refuse(*_: Any) -> None:
        raise BusFull("too few replicas are connected")

    with structlog.testing.capture_logs() as logs:
        world, (learner, *_) = await under_way(1)
        assert world.syncer is not None
        world.syncer.cancel()
        bus: Any = learner.bus
        write, bus.write_report = bus.write_report, refuse
        await asyncio.sleep(60)
        assert said() == 0
        bus.write_report = write
        await asyncio.sleep(30)
        assert said() == 1
        await end(learner)
