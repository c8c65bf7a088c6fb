"""Waiting for the first of several events, and work that goes on for the time of a block. asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from diloco.pipeline.bus.ports import Clock

TICK_S = 1e-3
"""Deadlines are met to this; a finer wait could end a rounding error early, for ever."""


async def first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Until one of the events is set, or the time is over; None: however long that takes."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def woken_or_done(wake: asyncio.Event, task: asyncio.Task[None], timeout_s: float) -> None:
    """Until an event is set, a task is done, or the time is over; the task goes on."""
    waiting = asyncio.ensure_future(wake.wait())
    try:
        await asyncio.wait({waiting, task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def pause(wake: asyncio.Event, goes_on: Callable[[], bool], clock: Clock, pause_s: float) -> None:
    """So long, or until it shall not go on, which is asked whenever `wake` is set; it is set afterwards."""
    until = clock.now() + pause_s
    while goes_on() and (left_s := until - clock.now()) > TICK_S:
        wake.clear()
        await first_of(wake, timeout_s=left_s)
    wake.set()


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
