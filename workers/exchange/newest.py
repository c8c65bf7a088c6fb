"""Read the newest globals of a run, even after a learner's own thread has ended."""

import asyncio
from collections.abc import Iterable

import structlog

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BadPayload, BusError
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.transfer.globals import pull_shown
from diloco.workers.encoding import Float32
from diloco.workers.exchange.redis_access import read_run
from diloco.workers.exchange.spec_check import compare
from diloco.workers.times import TIMES


async def read_newest(
    url: str, run: str, spec: Spec, layout: Layout, fragments: Iterable[int], known: RunState | None, *, left: bool
) -> list[Float32]:
    """Return the newest globals (elements,) of these fragments, with the precision with which learners pull them.

    Args:
        url: of Redis.
        run: its name.
        spec: the run's, as the learner has joined it.
        layout: the run's; payloads of other sizes are refused.
        fragments: which ones.
        known: the run's state as the learner last saw it.
        left: the learner has left. Only then a run that is ending does not wait for this learner, so the last merges
            can be waited for here.

    Raises:
        SpecMismatch, RunReplaced: another run has the name by now.
        BusError, BadPayload: there was no answer for a minute.
    """
    until, waits = LoopClock().now() + TIMES.newest_s, TIMES.reach_retry.waits()
    while True:
        try:
            async with open_bus(url, run) as bus:
                return await _read(bus, spec, layout, fragments, known, left)
        except (BusError, BadPayload):  # BadPayload: a global was replaced while it was read
            wait_s = next(waits)
            if LoopClock().now() + wait_s > until:
                raise
            await asyncio.sleep(wait_s)


async def _read(
    bus: Bus, spec: Spec, layout: Layout, fragments: Iterable[int], known: RunState | None, left: bool
) -> list[Float32]:
    if (held := await read_run(bus)) is None:
        raise BadPayload("the run has no spec: the bus has lost it; waiting for its learners to restore it")
    compare(spec, held)
    if (state := await bus.read_state()) is not None:
        state.check_same_run(known, bus.keys.run, "This learner was in")
    if left:
        await _last_merge(bus)
    found = []
    for fragment in map(layout.fragments.__getitem__, fragments):
        (head,) = await bus.read_heads([fragment.id])
        if head is None:
            raise BadPayload(
                f"fragment {fragment.id} has no head: the bus has lost it; waiting for a syncer to restore it"
            )
        sync = fragment.sync(spec.sync)
        found.append(await pull_shown(bus, head, fragment.elements, sync, asyncio.to_thread))
    return found


async def _last_merge(bus: Bus) -> None:
    until = LoopClock().now() + TIMES.newest_s
    while (state := await bus.read_state()) is not None and state.phase in (Phase.DRAINING, Phase.CLOSING):
        if LoopClock().now() > until:
            detail = "the run is not finishing; is a syncer running? Reading what has been merged so far"
            structlog.get_logger().warning("run_not_finished", phase=state.phase, detail=detail)
            return
        await asyncio.sleep(TIMES.poll_s)
