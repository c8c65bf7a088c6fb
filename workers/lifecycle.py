"""A learner's way into its run and out of it, each gone once, whatever threads, signals and forks do meanwhile.

| state | until |
|---|---|
| made | `open`, once |
| joining | it has joined; `leave` in another thread and a signal give it up |
| in its run | `leave`, or its other thread has failed |
| left | for ever: what it had joined is there to be looked at |
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
    """One learner's, in the process that made it."""

    def __init__(self, stopping: Stopping) -> None:
        self._pid = os.getpid()
        self.in_run = False
        """It has joined, and not begun to leave."""
        self.entered: JoinedLearner | None = None
        """What has joined; also after leaving."""
        self._stopping = stopping
        self._lock = threading.RLock()  # of what `open` and `leave` change; a handler may leave what its thread opens
        self._opened = self._left = False
        self._told = False
        """The other thread's failure was raised."""

    @property
    def is_here(self) -> bool:
        """Not in a process that was forked from the learner's."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raises UsageError in a process that was forked from the learner's."""
        if not self.is_here:
            raise UsageError("this Learner was made in another process, which this one was forked from: make one here")

    @property
    def joined(self) -> JoinedLearner:
        """What is in its run.

        Raises:
            UsageError: nothing is, or not of this process.
            DilocoError: what its other thread has ended by.
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
        """What has joined, also after leaving.

        Raises:
            UsageError: nothing has yet.
        """
        if self.entered is None:
            raise UsageError("the learner has not joined yet: use it in a `with` block, or open() it")
        return self.entered

    @property
    def untold_failure(self) -> BaseException | None:
        """What the other thread has ended by, if no call has told so."""
        return self.entered.thread.failure if self.entered is not None and not self._told else None

    def open(self, prepare: Callable[[], tuple[Training, ExchangeThread]]) -> None:
        """Join; whatever this raises, nothing of it is left behind.

        prepare: what joins, and the thread for it, not begun.

        Raises:
            UsageError: it was opened before, was left meanwhile by another thread, or is not of this process.
        """
        self.check_process()
        with self._lock:
            if self._opened:
                raise UsageError("a Learner is opened once: make a new one to join again, or a second time")
            self._opened = True
        try:
            self._stopping.install()
            try:
                self._join(*prepare())
            except SpecMismatch as error:
                if error.tensors or self._stopping.together:
                    raise
                # A syncer may have put its checkpoint's spec in the place of what this one had proposed.
                self._stopping.install()
                self._join(*prepare())
        except BaseException:  # KeyboardInterrupt above all
            self._stopping.restore()
            raise

    def go_on_joining(self) -> None:
        """Raises Stopped where a signal came, and UsageError where another thread has left already."""
        self._stopping.leave_if_asked()
        if self._left:
            raise UsageError("the learner was closed before it had joined")

    def _join(self, training: Training, thread: ExchangeThread) -> None:
        try:
            joined, found = thread.join_run(self.go_on_joining)
            training.keeper.restore(found)
            joined.hand_over((), joined.adopt())
            training.times.training_begins(time.perf_counter())
            with self._lock:
                self.go_on_joining()
                self.entered, self.in_run = joined, True
        except BaseException:
            self.entered, self.in_run = None, False
            thread.abandon()
            self._stopping.restore()
            thread.join()
            raise

    def leave(self, flush: Callable[[JoinedLearner], None]) -> bool:
        """Leave the run; whether it was in it until now.

        flush: called with what leaves, if its thread still works.
        """
        if not self.is_here:
            return False  # forked inside the `with` block: the run is the parent's
        with self._lock:
            joined, in_run = self.entered, self.in_run
            self.in_run, self._left = False, self._opened
        if joined is None or not in_run:  # it is closed, or being closed, or has yet to join
            return False
        try:
            if joined.thread.works:
                flush(joined)
        finally:  # also at a second Ctrl-C: a thread that goes on would count as a learner
            joined.thread.end()
            self._stopping.restore()
        joined.thread.join()
        if not joined.thread.works:
            joined.forget()
        return True
