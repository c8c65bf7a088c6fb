"""Waiting for the first of several events. asyncio."""

import asyncio


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
