"""Threads beside the training thread."""

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress


def yield_core() -> None:
    """Called in a background thread: its wake-ups must not take the core from the training thread."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # where that is not allowed, it only costs a little
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


class BackgroundThread:
    """Does jobs one after the other; not waited for when the process ends, unlike an executor's threads.

    One thread submits. A job that raises would end the thread: catch what it may raise.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._submitted = self._done = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @property
    def busy(self) -> bool:
        """A job is not done yet."""
        return self._submitted != self._done

    def submit(self, job: Callable[[], None]) -> None:
        """Have it done after those before it."""
        if not self._submitted:
            self._thread.start()
        self._submitted += 1
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Wait for what was submitted; whether it is all done."""
        if self._submitted:
            self._jobs.put(None)
            self._thread.join(timeout_s)
        return not self.busy

    def _work(self) -> None:
        yield_core()
        while (job := self._jobs.get()) is not None:
            job()
            self._done += 1
