"""The server's failures in a simulated world: two of them at once are not more than each."""

import asyncio
from dataclasses import replace

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.fragments import layout_of
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time
from tests.world.oracle import Oracle
from tests.world.plan import Fault, Kind, plan
from tests.world.record import WorldStore
from tests.world.server import Server

REWIND = Fault("rewind", Kind.BUS_REWOUND, 0.0, 0, 1.0)


def a_server() -> tuple[WorldStore, Server]:
    store, clock, given = WorldStore(), VirtualClock(), plan(0)
    oracle = Oracle(given, layout_of(given.spec.tensors), store, RunKeys("run"), clock.now)
    return store, Server(store, oracle, clock)


@in_virtual_time
async def test_of_two_full_times_that_overlap_the_later_end_holds() -> None:
    store, server = a_server()
    longer = asyncio.create_task(server.fill(1.0))
    await asyncio.sleep(0.1)
    await server.fill(0.2)
    assert store.full
    await longer
    assert not store.full


@in_virtual_time
async def test_a_rewind_brings_back_nothing_from_before_another_restart() -> None:
    """Two that overlap: the second would bring back what the first one lost."""
    store, server = a_server()
    happened: list[str] = []
    first = asyncio.create_task(server.restart(REWIND, lambda: happened.append("first")))
    await asyncio.sleep(0.5)
    store.values["late"] = b"lost with the first"
    second = replace(REWIND, id="second")
    await server.restart(second, lambda: happened.append("second"))
    await first
    assert happened == ["first"]
    assert "late" not in store.values
    assert server.epoch == 1
