"""When a learner says that no syncer is there."""

import asyncio
from typing import Any

import structlog

from diloco.pipeline.errors import BusFull
from diloco_studies.virtual.virtual_time import run_virtual
from tests.virtual_run import end, under_way


def test_that_no_syncer_is_there_is_not_said_while_redis_refuses_writes_but_within_half_a_minute_after() -> None:
    """While nobody can write, none can say that it is there."""

    async def main() -> list[int]:
        world, (learner, *_) = await under_way(1)
        assert world.syncer is not None
        world.syncer.cancel()
        bus, found = learner.bus, list[int]()
        write = bus.write_report

        async def refuse(*_: Any) -> None:
            raise BusFull("too few replicas answer")

        bus.write_report = refuse  # type: ignore[method-assign]
        await asyncio.sleep(60)
        found.append(said())
        bus.write_report = write  # type: ignore[method-assign]
        await asyncio.sleep(30)
        found.append(said())
        await end(learner)
        return found

    with structlog.testing.capture_logs() as logs:

        def said() -> int:
            return sum(one["event"] == "no_syncer" and one["learner"] == "l0" for one in logs)

        assert run_virtual(main()) == [0, 1]
