"""The parts of a learner that do not depend on its framework: it joins, counts steps, reads data, and leaves.

A framework's own learner subclasses this for the sake of its public methods. All that differs stands behind two
protocols: it describes its model to the run (`proposed.Proposed`), and copies fragments out of it and into it
(`training.Parameters`).

Joining and leaving happen once each, despite threads, signals and forks:

| state | until |
|---|---|
| made | `open` is called, once |
| joining | it has joined; `close` in another thread or a signal makes it give up |
| in its run | `close` is called, or the exchange thread fails |
| left | forever; what had joined can still be looked at |
"""

import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Self

import structlog

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process.interrupts import without_traceback
from diloco.pipeline.process.party_names import own_name
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.settings import BusSettings, load
from diloco.workers.batches import Batches
from diloco.workers.checks.arguments import Arguments
from diloco.workers.copies.losses import Loss
from diloco.workers.encoding import Float32
from diloco.workers.exchange import redis_access
from diloco.workers.exchange.newest import read_newest
from diloco.workers.exchange.redis_access import in_own_loop
from diloco.workers.joined import LearnerThread
from diloco.workers.moments.recovery import Source
from diloco.workers.proposed import Proposed
from diloco.workers.ranks.rank_learner import Joined, RankThread
from diloco.workers.schedule import FRESH_MOMENTS_STEPS
from diloco.workers.shard_reader import begin_batches, begin_blocks
from diloco.workers.spec_proposal import proposal
from diloco.workers.step_times import StepTimes
from diloco.workers.stopping import Stopped, Stopping


def _leave_dropped(thread: LearnerThread, learner: str, pid: int) -> None:
    """End the thread of a learner to which nothing refers any more, so that the run does not count it as live."""
    if thread.works and os.getpid() == pid:
        detail = "nothing refers to this Learner any more: it leaves without its last training; call close() first"
        structlog.get_logger().warning("learner_dropped", learner=learner, detail=detail)
        thread.abandon()


class BaseLearner:
    """One learner of a run, for any kind of model."""

    def __init__(self, given: Arguments, stopping: Stopping) -> None:
        """Connect to nothing yet: `with` or `open` does.

        Raises:
            UsageError: there is no Redis URL.
        """
        self._given, self._url = given, redis_access.url_of(given.redis_url)
        self.incarnation = secrets.token_hex(8)
        self.id = given.learner_id or own_name(self.incarnation)
        self.left_in_order = False  # set on leaving: everything unpublished was flushed in time
        self.times = StepTimes()
        self._stopping = stopping
        self._batches: Batches | None = None
        self._pid = os.getpid()
        # Guards what `open` and `close` change. It is reentrant, because a signal handler may call `close` in the very
        # thread that holds it in `open`.
        self._lock = threading.RLock()
        self._opened = self._closed = False
        self._in_run = False  # it has joined, and has not begun to leave
        self._entered: Joined | None = None  # kept after leaving
        self._steps_after_end = 0
        self._failure_raised = False  # the exchange thread's failure was raised to the caller

    # --- what a training loop sees ------------------------------------------------------------------

    def _step(self, tokens: int, loss: Loss | None = None) -> None:
        """Count an inner step that was just done, and do what follows from it."""
        entered = time.perf_counter()
        joined = self.joined
        # A trainer may look at `finished` only after its first step: that step must not add to a finished run's sums.
        tokens = 0 if joined.late else tokens
        training = joined.training
        if training.watch is not None:
            training.watch.inspect(entered)
        self.times.entered(entered)
        if self._batches is not None:
            self._batches.stepped()
        tokens = joined.stepped(tokens)
        if loss is not None:
            training.losses.add(loss, self.times.elapsed_s(entered))
        training.keeper.stepped(joined.shared, joined.progress, loss)
        self.times.returned(entered, time.perf_counter(), tokens)
        self._stopping.stepped()
        state = joined.shared.state
        if joined.over and state is not None and state.phase is Phase.FINISHED:
            self._steps_after_end += 1
            if self._steps_after_end == 2:  # the first one may have begun before the end
                detail = (
                    "the run is over: what is trained from here on counts for nothing; leave the loop when "
                    "learner.finished is True"
                )
                structlog.get_logger().warning("trained_after_end", learner=self.id, detail=detail)

    @property
    def finished(self) -> bool:
        """True when the loop should be left: the run is over or asked to end, or SIGTERM or SIGHUP has come."""
        return self._stopping.asked or self.over

    @property
    def over(self) -> bool:
        """True if the run has reached its budget or was asked to end."""
        return self._entered is not None and self._entered.over

    @property
    def exit_status(self) -> int:
        """Status for `sys.exit` at the program's end: 75 if it was asked to end while the run continues, else 0."""
        return AGAIN_STATUS if self._stopping.came and not self.over else 0

    @property
    def progress(self) -> float:
        """Trained tokens of the whole run / its budget, in 0..1; learning-rate schedules follow it."""
        return self._entered.progress if self._entered else 0.0

    def _schedule_inputs(self) -> tuple[float, int, int]:
        """Return a schedule's inputs: run progress, own steps, and steps of the ramp after a restart (0: none)."""
        young = self._entered is not None and self.recovered in ("checkpoint", "fresh")
        steps = self._entered.training.rounds.steps if self._entered else 0
        return self.progress, self.earlier_steps + steps, FRESH_MOMENTS_STEPS * young

    @property
    def recovered(self) -> Source:
        """Source of the optimizer's moments: "start" (of the run), "checkpoint", "optimizer", "peer" or "fresh".

        "optimizer" means that it had them when the learner joined, for example because the trainer loaded its own
        checkpoint.
        """
        return self._entered.training.keeper.source if self._entered else "start"

    @property
    def earlier_steps(self) -> int:
        """Inner steps of this learner's earlier incarnations, as its checkpoint knows them; 0 without one."""
        return self._entered.training.keeper.earlier_steps if self._entered else 0

    @property
    def spec(self) -> Spec:
        """The spec that the run has agreed on."""
        return self._once_joined.training.spec

    @property
    def joined(self) -> Joined:
        """The parts of the learner while it is in its run, for this class and for measurements and tests.

        Raises:
            UsageError: the learner is not in a run, or was made in another process.
            DilocoError: its exchange thread has failed with this error.
        """
        self._check_process()
        if self._entered is not None and self._entered.thread.failure is not None:
            self._failure_raised = True
            self._entered.thread.notice()
            without_traceback(self._entered.thread.failure)
            raise self._entered.thread.failure
        if self._entered is None or not self._in_run:
            raise UsageError("the learner is not in a run: use it in a `with` block, or between open() and close()")
        return self._entered

    @property
    def _once_joined(self) -> Joined:
        """The parts of the learner that has joined, even after it has left.

        Raises:
            UsageError: it has not joined yet.
        """
        if self._entered is None:
            raise UsageError("the learner has not joined yet: use it in a `with` block, or open() it")
        return self._entered

    def _read(self, fragments: Iterable[int]) -> list[Float32]:
        """Return the newest globals (elements,) of these fragments."""
        joined, left = self._once_joined, not self._in_run
        given = self._url, self._given.run, joined.training.spec, joined.training.layout
        return in_own_loop(read_newest(*given, fragments, joined.shared.state, left=left))

    def blocks(self, total: int, per_shard: int) -> Iterator[tuple[int, int]]:
        """Return an endless iterator of (epoch, index) of data blocks from the run's work queue.

        A shard is acknowledged when its last block was read. The call waits for the first shard before it returns: this
        is still part of joining. If the learner has several ranks, only rank 0 may call it, and tells the others what
        to read.

        Args:
            total: blocks in an epoch; every learner must give the same number.
            per_shard: blocks handed out at a time.
        """
        return begin_blocks(lambda: self.joined, self._stopping, total, per_shard)

    def batches(self, length: int, batch_size: int, *, seed: int = 0, accumulate: int = 1) -> Batches:
        """Return batches of dataset indices: `DataLoader(dataset, batch_sampler=learner.batches(...))`.

        They come from the run's work queue. A shard is acknowledged when it was trained on, as counted by `step` or
        `attach`. The call waits for the first shard, as `blocks` does.

        Args:
            length: of the dataset; every learner must give the same one.
            seed: of each epoch's permutation; every learner must give the same one.
            batch_size: indices in a batch. If the learner has several ranks, all call this alike, and it is the size of
                each rank's own batch.
            accumulate: batches that one inner step trains.

        Raises:
            SpecMismatch: the run has another length or seed.
            UsageError: an argument is not such a number, or the learner reads data already, or is not in its run.
        """
        self._batches = begin_batches(lambda: self.joined, self._stopping, length, batch_size, seed, accumulate)
        return self._batches

    @staticmethod
    def read_spec(redis_url: str, run: str) -> Spec | None:
        """Return the spec of a run if it is there, else None; for a trainer that joins without settings of its own.

        Raises:
            UsageError: there can be no run of this name.
        """
        return redis_access.read_spec(redis_url, load(BusSettings, {"run": run}).run)

    # --- joining and leaving --------------------------------------------------------------------------

    def open(self) -> Self:
        """Join: connect, agree with the run, fetch the model. If this raises, nothing of the learner is left behind.

        `with` does the same, and closes the learner at its end. Without `with`, put `close` into a `finally`. If a
        program ends without `close`, the run treats it as killed.

        Raises:
            UsageError: the learner was opened before, was closed meanwhile by another thread, or was made in another
                process.
            IdTaken: another process has this learner's id.
            SpecMismatch: the run was set up otherwise.
            SystemExit: SIGTERM or SIGHUP came.
        """
        self._check_process()
        with self._lock:
            if self._opened:
                raise UsageError("a Learner can be opened only once: create a new one to join again")
            self._opened = True
        self.times.joining_begins(time.perf_counter())
        try:
            self._stopping.install()
            try:
                joined = self._join(self._prepare())
            except SpecMismatch as error:
                if error.tensors or self._stopping.together:
                    raise
                joined = None
            if joined is None:
                # A syncer may have replaced this learner's proposal by its checkpoint's spec: `_prepare` once more,
                # which now follows that spec. Outside of `except`, so that a traceback has one error, not two.
                self._stopping.install()
                joined = self._join(self._prepare())
        except BaseException as error:
            self._stopping.restore()
            without_traceback(error)
            raise
        if joined.late:
            detail = (
                f"the learner has its model; to train further, run `diloco runs extend {self._given.run} --tokens N`, "
                "or choose a different run name"
            )
            structlog.get_logger().warning("run_finished_already", learner=self.id, run=self._given.run, detail=detail)
        return self

    def __enter__(self) -> Self:
        """Join the run, as `open` does."""
        return self.open()

    def _prepare(self) -> LearnerThread | RankThread:
        """Return the exchange thread of what will join, not started; a framework's learner implements it."""
        raise NotImplementedError

    def _proposed(self, held: Spec | None = None) -> Proposed:
        """Return the model, described for the proposal of a run; a framework's learner implements it.

        held: the run's spec; None: it has none. The order of its tensors applies to leaves of a pytree.
        """
        raise NotImplementedError

    def _proposal(self) -> Spec:
        """Return the spec to propose: it follows the run's spec or, without one, the settings of a waiting syncer."""
        beginning, url, run, go_on = redis_access.FirstSpecSettings(), self._url, self._given.run, self._go_on_joining
        held = redis_access.wait_for_spec(partial(self.read_spec, url, run), self.id, go_on)
        if held is None:
            beginning = redis_access.wait_for_spec(
                partial(redis_access.read_first_spec_settings, url, run), self.id, go_on
            )
        return proposal(self._proposed(held), self._given, held, beginning)

    def _go_on_joining(self) -> None:
        """Raise Stopped if a signal came, and UsageError if another thread has closed the learner already."""
        self._stopping.leave_if_asked()
        if self._closed:
            raise UsageError("the learner was closed before it joined")

    def _join(self, thread: LearnerThread | RankThread) -> Joined:
        try:
            joined, found = thread.join_run(self._go_on_joining)
            joined.training.keeper.restore(found)
            joined.hand_over((), joined.adopt())
            joined.training.times.training_begins(time.perf_counter())
            with self._lock:  # checked under the lock: a `close` before this is seen here, a later one finds `_in_run`
                self._go_on_joining()
                self._entered, self._in_run = joined, True
            if isinstance(thread, LearnerThread):
                weakref.finalize(self, _leave_dropped, thread, self.id, self._pid).atexit = False
            return joined
        except BaseException:
            self._entered, self._in_run = None, False
            thread.abandon()
            self._stopping.restore()
            thread.join()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, Stopped):
            self._leave(save_state=True)
        else:
            if isinstance(error, KeyboardInterrupt):
                without_traceback(error)
            try:
                self._leave(save_state=isinstance(error, KeyboardInterrupt | SystemExit), error=error)
            except Exception as failure:  # only logged: the program must see the error that has ended its loop
                structlog.get_logger().error("leaving_failed", learner=self.id, error=repr(failure))

    def close(self, save_state: bool = True) -> None:
        """Publish and flush what is unpublished within `leave_s`, and leave the run; sets `left_in_order`.

        Nothing happens if the learner is closed already or was never opened. If another thread is joining, it gives up.

        Args:
            save_state: save the optimizer's state for a later incarnation.

        Raises:
            LearnerReplaced: another process took this learner's place meanwhile.
            DilocoError: the exchange thread has failed with this error, and no call has raised it yet.
            SystemExit: SIGTERM or SIGHUP came, and nobody has asked whether the learner is `finished`.
        """
        failure = self._entered.thread.failure if self._entered is not None and not self._failure_raised else None
        if self._leave(save_state):
            if failure is not None:  # it failed after the last step, so no step could raise it
                without_traceback(failure)
                raise failure
            self._stopping.raise_if_unread()

    def _leave(self, save_state: bool, error: BaseException | None = None) -> bool:
        """Leave the run, as `close` does; return whether the learner was in it until now.

        error: the error that has ended the loop, on this rank only.
        """
        if not self._is_here:
            return False  # forked inside the `with` block: the run is the parent's
        with self._lock:
            joined, in_run = self._entered, self._in_run
            self._in_run, self._closed = False, self._opened
        if joined is None or not in_run:  # closed already, being closed by another thread, or not joined yet
            return False
        try:
            if joined.thread.works and not (error is not None and joined.abort(error)):
                self.left_in_order = joined.leave(self._given.leave_s, save_state)
        finally:  # also on a second Ctrl-C: a thread that kept running would still count as a learner
            joined.thread.end()
            self._stopping.restore()
        joined.thread.join()
        if not joined.thread.works:
            joined.forget()
        return True

    @property
    def _is_training(self) -> bool:
        """True while the learner is in its run, in this process, and its exchange thread works."""
        return self._is_here and self._in_run and self._entered is not None and self._entered.thread.works

    @property
    def _is_here(self) -> bool:
        """False in a process that was forked from the learner's."""
        return os.getpid() == self._pid

    def _check_process(self) -> None:
        if not self._is_here:
            raise UsageError("this Learner was created in the process from which this one was forked: create one here")
