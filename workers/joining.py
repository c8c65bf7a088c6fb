"""What goes on beside a learner's joining; what is said where that takes long, or later nobody merges. asyncio."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from pipeline.errors import BusError
from pipeline.ports import Bus, SyncerBoard

PATIENCE_S = 3.0
"""After so long it is said what is waited for."""
LOOK_FOR_SYNCERS_S = 10.0


@asynccontextmanager
async def meanwhile(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Work that goes on for the time of a block. If any of it fails, the block ends by its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def say_why(bus: Bus, fragments: Sequence[int], claim_s: float, log: Any) -> None:
    """Say what joining waits for where it takes long, once for each reason, until cancelled."""
    said = ""
    while True:
        await asyncio.sleep(PATIENCE_S)
        with suppress(BusError):  # which is told by whoever needs the bus
            why = await reason(bus, fragments, claim_s)
            if why and why != said:
                log.warning("joining_delayed", detail=why)
            said = why


async def reason(bus: Bus, fragments: Sequence[int], claim_s: float) -> str:
    """What a learner that joins waits for, and what to do; empty where it is for its own pulls.

    Raises:
        BusError: the bus cannot be read.
    """
    if None not in await bus.read_heads(fragments):
        return ""
    syncers = await bus.read_syncers()
    if not syncers:
        return f"no syncer serves run {bus.keys.run!r}: start `diloco syncer --run {bus.keys.run}` with the same Redis"
    if await bus.read_initial() is None:
        return (
            "a learner uploads the first parameters, and the others wait for it; if it has died, another one begins "
            f"within {claim_s:g} s"
        )
    return f"syncer {', '.join(sorted(set(syncers.values())))} has yet to take over the first parameters"


async def look_for_syncers(bus: SyncerBoard, log: Any) -> None:
    """Say so if nobody merges what is published: it is bounded (a delta a base, which expires), and of no use.

    Until cancelled.

    Raises:
        BusError: the bus cannot be read.
    """
    missed = 0
    while True:
        await asyncio.sleep(LOOK_FOR_SYNCERS_S)
        here = await bus.read_syncers()
        if here and missed > 1:
            log.info("syncer_found", syncers=list(here.values()))
        missed = 0 if here else missed + 1
        if missed == 2:
            remedy = "start `diloco syncer` for this run; training goes on, and all that is published is offered again"
            log.warning("no_syncer", detail=f"nothing is merged: {remedy}")
