"""Threads beside the training thread."""

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any


def yield_core() -> None:
    """Called in a background thread: its wake-ups must not take the core from the training thread."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # where that is not allowed, it only costs a little
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


async def offload(work: Callable[..., Any], *args: Any) -> Any:
    """Have an executor's thread work; as the program ends there is none any more, and nobody waits: here."""
    try:
        working = asyncio.get_running_loop().run_in_executor(None, partial(work, *args))
    except RuntimeError:
        return work(*args)
    return await working


class OwnThread(threading.Thread):
    """A learner's own: leaving waits for it, so it cannot wait until a learner has left."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(target=work, name=name, daemon=True)

    def run(self) -> None:
        """Work, behind the training thread."""
        yield_core()
        super().run()


class BackgroundThread:
    """Does jobs one after the other; not waited for when the process ends, unlike an executor's threads.

    One thread submits. A job that raises would end the thread: catch what it may raise.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._submitted = self._done = 0
        self._thread = OwnThread(name, self._work)

    @property
    def busy(self) -> bool:
        """A job is not done yet."""
        return self._submitted != self._done

    def submit(self, job: Callable[[], None]) -> None:
        """Have it done after those before it."""
        if not self._submitted:
            with suppress(RuntimeError):  # the program ends, and Python begins no more threads: `close` does it
                self._thread.start()
        self._submitted += 1
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Wait for what was submitted; whether it is all done."""
        if self._submitted:
            self._jobs.put(None)
            if not self._thread.is_alive():
                self._work()
            if self._thread.is_alive():  # its `start` was broken off by a signal's handler, and it has begun since
                self._thread.join(timeout_s)
        return not self.busy

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            self._done += 1
        self._jobs.put(None)  # there may be two who work: a thread that begins late, and `close`
