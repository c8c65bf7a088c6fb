"""A learner's way into its run and out of it, each taken once, despite threads, signals and forks.

| state | until |
|---|---|
| made | `open` is called, once |
| joining | it has joined; `leave` in another thread or a signal makes it give up |
| in its run | `leave` is called, or the exchange thread fails |
| left | for ever; what had joined can still be looked at |
"""

import os
import threading
import time
from collections.abc import Callable

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.workers.exchange.exchange_thread import ExchangeThread, JoinedLearner
from diloco.workers.stopping import Stopping
from diloco.workers.training import Training


class Life:
    """The life cycle of one learner, in the process that made it."""

    def __init__(self, stopping: Stopping) -> None:
        self._pid = os.getpid()
        self.in_run = False  # the learner has joined, and has not begun to leave
        self.entered: JoinedLearner | None = None  # the joined learner; kept after leaving
        self._stopping = stopping
        # Guards what `open` and `leave` change. It is reentrant, because a signal handler may call `leave` in the very
        # thread that holds it in `open`.
        self._lock = threading.RLock()
        self._opened = self._left = False
        self._told = False  # the exchange thread's failure was raised to the caller

    @property
    def is_here(self) -> bool:
        """False in a process that was forked from the learner's."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise UsageError in a process that was forked from the learner's."""
        if not self.is_here:
            raise UsageError("this Learner was made in another process, which this one was forked from: make one here")

    @property
    def joined(self) -> JoinedLearner:
        """The learner in its run.

        Raises:
            UsageError: it is not in a run, or was made in another process.
            DilocoError: the exchange thread has failed with this error.
        """
        self.check_process()
        if self.entered is not None and self.entered.thread.failure is not None:
            self._told = True
            self.entered.thread.notice()
            raise self.entered.thread.failure
        if self.entered is None or not self.in_run:
            raise UsageError("the learner is not in a run: use it in a `with` block, or between open() and close()")
        return self.entered

    @property
    def once_joined(self) -> JoinedLearner:
        """The learner that has joined, also after it has left.

        Raises:
            UsageError: it has not joined yet.
        """
        if self.entered is None:
            raise UsageError("the learner has not joined yet: use it in a `with` block, or open() it")
        return self.entered

    @property
    def untold_failure(self) -> BaseException | None:
        """The error that has ended the exchange thread, if no call has raised it yet."""
        return self.entered.thread.failure if self.entered is not None and not self._told else None

    def open(self, prepare: Callable[[], tuple[Training, ExchangeThread]]) -> None:
        """Join; if this raises, nothing of the learner is left behind.

        prepare: returns what joins, and the thread for it, not started.

        Raises:
            UsageError: it was opened before, was left meanwhile by another thread, or was made in another process.
        """
        self.check_process()
        with self._lock:
            if self._opened:
                raise UsageError("a Learner can be opened once: make a new one to join again, or a second time")
            self._opened = True
        try:
            self._stopping.install()
            try:
                self._join(*prepare())
            except SpecMismatch as error:
                if error.tensors or self._stopping.together:
                    raise
                # A syncer may have replaced this learner's proposal by its checkpoint's spec: `prepare` once more,
                # which now follows that spec.
                self._stopping.install()
                self._join(*prepare())
        except BaseException:  # KeyboardInterrupt above all
            self._stopping.restore()
            raise

    def go_on_joining(self) -> None:
        """Raise Stopped if a signal came, and UsageError if another thread has left already."""
        self._stopping.leave_if_asked()
        if self._left:
            raise UsageError("the learner was closed before it had joined")

    def _join(self, training: Training, thread: ExchangeThread) -> None:
        try:
            joined, found = thread.join_run(self.go_on_joining)
            training.keeper.restore(found)
            joined.hand_over((), joined.adopt())
            training.times.training_begins(time.perf_counter())
            with self._lock:  # checked under the lock: a `leave` before this is seen here, a later one finds `in_run`
                self.go_on_joining()
                self.entered, self.in_run = joined, True
        except BaseException:
            self.entered, self.in_run = None, False
            thread.abandon()
            self._stopping.restore()
            thread.join()
            raise

    def leave(self, flush: Callable[[JoinedLearner], None]) -> bool:
        """Leave the run; return whether the learner was in it until now.

        flush: called with the joined learner if its thread still works.
        """
        if not self.is_here:
            return False  # forked inside the `with` block: the run is the parent's
        with self._lock:
            joined, in_run = self.entered, self.in_run
            self.in_run, self._left = False, self._opened
        if joined is None or not in_run:  # closed already, being closed by another thread, or not joined yet
            return False
        try:
            if joined.thread.works:
                flush(joined)
        finally:  # also on a second Ctrl-C: a thread that kept running would still count as a learner
            joined.thread.end()
            self._stopping.restore()
        joined.thread.join()
        if not joined.thread.works:
            joined.forget()
        return True
