"""Threads that work alongside the training thread."""

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any


def yield_core() -> None:
    """Give the calling background thread a scheduling class whose wake-ups do not preempt the training thread."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # if it is not permitted, training is only slightly slower
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


async def offload(work: Callable[..., Any], *args: Any) -> Any:
    """Run `work` in an executor's thread, or here if the program is ending, when there is no executor any more."""
    try:
        working = asyncio.get_running_loop().run_in_executor(None, partial(work, *args))
    except RuntimeError:
        return work(*args)
    return await working


class OwnThread(threading.Thread):
    """A daemon thread of a learner. Leaving waits for it with a timeout; Python's exit must not wait for it."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(target=work, name=name, daemon=True)

    def run(self) -> None:
        """Run `work` with a scheduling class behind the training thread."""
        yield_core()
        super().run()


class BackgroundThread:
    """Runs jobs one after the other in a thread. Unlike an executor's threads, it does not delay the process's exit.

    Only one thread may submit. A job that raises would end the thread, so jobs must catch what they may raise.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._submitted = self._done = 0
        self._thread = OwnThread(name, self._work)

    @property
    def busy(self) -> bool:
        """True while a job is not done."""
        return self._submitted != self._done

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job, to run after those before it."""
        if not self._submitted:
            with suppress(RuntimeError):  # the program is ending and starts no more threads: `close` runs the job
                self._thread.start()
        self._submitted += 1
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Wait for the submitted jobs; return whether all are done."""
        if self._submitted:
            self._jobs.put(None)
            if not self._thread.is_alive():
                self._work()
            if self._thread.is_alive():  # even if a signal handler interrupted its `start`, and it has begun only now
                self._thread.join(timeout_s)
        return not self.busy

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            self._done += 1
        self._jobs.put(None)  # for a second reader of the queue: a thread that starts late, concurrently with `close`
