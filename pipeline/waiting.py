"""Waiting for the first of several events, and background work for the duration of a block. Runs on asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from diloco.pipeline.bus.ports import Clock

# A rest shorter than this, s, counts as over. A timer may fire a rounding error early; a loop that waited for such a
# tiny rest could spin forever.
TICK_S = 1e-3


async def first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until one of the events is set or the timeout expires (None: no timeout)."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their end; their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def pause(wake: asyncio.Event, goes_on: Callable[[], bool], clock: Clock, pause_s: float) -> None:
    """Sleep for `pause_s`, or until `goes_on()` is false; it is asked again each time `wake` is set.

    `wake` is always set on return, so that the caller's own wait does not miss a wake-up that this function consumed.
    """
    until = clock.now() + pause_s
    while goes_on() and (left_s := until - clock.now()) > TICK_S:
        wake.clear()
        await first_of(wake, timeout_s=left_s)
    wake.set()


@asynccontextmanager
async def in_background(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines in the background for the duration of a block, and cancel them at its end.

    If one of them fails, the block is cancelled and its error is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # callers expect the plain error, not a group
