"""What a learner does whatever its model is made of: it joins, counts steps, reads its data, and leaves.

A learner of one framework says what its model looks like to a run (`spec_proposal.Proposed`), and copies fragments out
of it and into it, as `FragmentParameters` does for torch. All else is here and below, and the same.
"""

import secrets
import time
from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Self

import structlog

from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process.party_names import own_name
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.workers.batches import Batches
from diloco.workers.checks.arguments import Arguments
from diloco.workers.copies.losses import Loss
from diloco.workers.exchange import connecting
from diloco.workers.exchange.connecting import in_own_loop
from diloco.workers.exchange.exchange_thread import ExchangeThread, JoinedLearner
from diloco.workers.exchange.newest import Float32, read_newest
from diloco.workers.lifecycle import Life
from diloco.workers.moments.recovery import Source
from diloco.workers.shard_reader import begin_batches, begin_blocks
from diloco.workers.spec_proposal import Proposed, proposal
from diloco.workers.step_times import StepTimes
from diloco.workers.stopping import Stopped, Stopping
from diloco.workers.trainer.schedule import FRESH_MOMENTS_STEPS
from diloco.workers.training import Training


class BaseLearner:
    """One learner of a run, of any model."""

    def __init__(self, given: Arguments, stopping: Stopping) -> None:
        """Nothing is connected before `with`, or `open`.

        Raises:
            UsageError: no Redis URL.
        """
        self._given, self._url = given, connecting.url_of(given.redis_url)
        self.incarnation = secrets.token_hex(8)
        self.id = given.learner_id or own_name(self.incarnation)
        self.left_in_order = False
        """After leaving: everything unpublished got away in time."""
        self.times = StepTimes()
        self._stopping = stopping
        self._life = Life(stopping)
        self._batches: Batches | None = None

    # --- what a training loop sees ------------------------------------------------------------------

    def _step(self, tokens: int, loss: Loss | None = None) -> None:
        """An inner step is done."""
        entered = time.perf_counter()
        joined = self.joined
        tokens = 0 if joined.late else tokens  # a trainer may look only after a step: the finished run's sums stay
        training = joined.training
        training.watch.look(entered)
        self.times.entered(entered)
        if self._batches is not None:
            self._batches.stepped()
        tokens = joined.stepped(tokens)
        if loss is not None:
            training.losses.tell(loss)
        training.keeper.stepped(joined.shared, joined.progress, loss)
        self.times.returned(entered, time.perf_counter(), tokens)
        self._stopping.stepped()

    @property
    def finished(self) -> bool:
        """The run has reached its budget or is asked to end, or this process is (SIGTERM, SIGHUP): leave the loop."""
        return self._life.entered.ended(self._stopping) if self._life.entered else self._stopping.asked

    @property
    def over(self) -> bool:
        """The run has reached its budget or is asked to end."""
        return self._life.entered is not None and self._life.entered.over

    @property
    def exit_status(self) -> int:
        """For `sys.exit` at the program's end: 75 if it was asked to end and the run goes on without it, else 0."""
        return AGAIN_STATUS if self._stopping.came and not self.over else 0

    @property
    def progress(self) -> float:
        """Trained tokens of the whole run / its budget, in 0..1: what learning-rate schedules go by."""
        return self._life.entered.progress if self._life.entered else 0.0

    def _place(self) -> tuple[float, int, int]:
        """Where a schedule of learning rates is: progress, own steps, steps of a ramp."""
        entered = self._life.entered
        young = entered is not None and self.recovered in ("checkpoint", "fresh")
        steps = entered.training.rounds.steps if entered else 0
        return self.progress, self.earlier_steps + steps, FRESH_MOMENTS_STEPS * young

    @property
    def recovered(self) -> Source:
        """Where the optimizer's moments came from: "start" (of the run), "checkpoint", "optimizer", "peer" or "fresh".

        "optimizer": it had them as the learner joined, as a trainer loads them with a checkpoint of its own.
        """
        return self._life.entered.training.keeper.source if self._life.entered else "start"

    @property
    def earlier_steps(self) -> int:
        """Inner steps of this learner's earlier incarnations, as its checkpoint knows them; else 0."""
        return self._life.entered.training.keeper.earlier_steps if self._life.entered else 0

    @property
    def spec(self) -> Spec:
        """What the run has agreed on."""
        return self._life.once_joined.training.spec

    @property
    def joined(self) -> JoinedLearner:
        """Its parts, while it is in its run: for this class, and for whoever measures or tests it.

        Raises:
            UsageError: it is not in a run, or not of this process.
            DilocoError: what its other thread has ended by.
        """
        return self._life.joined

    def _read(self, fragments: Iterable[int]) -> list[Float32]:
        """Their newest globals (elements,)."""
        joined, left = self._life.once_joined, not self._life.in_run
        given = self._url, self._given.run, joined.training.spec, joined.training.layout
        return in_own_loop(read_newest(*given, fragments, joined.shared.state, left=left))

    def blocks(self, total: int, per_shard: int) -> Iterator[tuple[int, int]]:
        """Endless (epoch, index) of data blocks from the run's work queue; a shard is acknowledged when read.

        Waits for the first shard before it returns: this is still part of joining. Of several ranks rank 0 alone may
        call it, and tells the others what to read.

        Args:
            total: blocks in an epoch; every learner must say the same.
            per_shard: blocks handed out at a time.
        """
        return begin_blocks(lambda: self.joined, self._stopping, total, per_shard)

    def batches(self, length: int, batch_size: int, *, seed: int = 0, accumulate: int = 1) -> Batches:
        """Indices of a dataset from the run's work queue: `DataLoader(dataset, batch_sampler=learner.batches(...))`.

        A shard is acknowledged when it is trained on, as `step` or `attach` tell. Waits for the first one, as `blocks`.

        Args:
            length, seed: of the dataset, and of each epoch's permutation; every learner must say the same.
            batch_size: indices in a batch; of several ranks, which all call this alike: in a batch of this one.
            accumulate: batches that an inner step trains.

        Raises:
            SpecMismatch: the run has another length or seed.
            UsageError: an argument is no such number, or the learner reads already, or is not in its run.
        """
        self._batches = begin_batches(lambda: self.joined, self._stopping, length, batch_size, seed, accumulate)
        return self._batches

    @staticmethod
    def read_spec(redis_url: str, run: str) -> Spec | None:
        """The spec of a run that is already there, else None. For a trainer that joins knowing nothing."""
        return connecting.read_spec(redis_url, run)

    # --- joining and leaving --------------------------------------------------------------------------

    def open(self) -> Self:
        """Join: connect, agree with the run, fetch the model. Whatever it raises, nothing of it is left behind.

        `with` does the same, and closes at its end. Without `with`, `close` belongs in a `finally`: a program that ends
        without it ends as if it had been killed.

        Raises:
            UsageError: it was opened before, was closed meanwhile by another thread, or is not of this process.
            IdTaken: another process has this learner's id.
            SpecMismatch: the run was set up otherwise.
            SystemExit: SIGTERM or SIGHUP came.
        """
        self._life.open(self._prepare)
        if self._life.once_joined.late:
            detail = "it has its model; to train on: diloco runs extend NAME --tokens N, or another name of the run"
            structlog.get_logger().warning("run_finished_already", learner=self.id, run=self._given.run, detail=detail)
        return self

    def __enter__(self) -> Self:
        """As `open`."""
        return self.open()

    def _prepare(self) -> tuple[Training, ExchangeThread]:
        """What joins, and the thread for it, not begun."""
        raise NotImplementedError

    def _proposed(self) -> Proposed:
        """The model, as a run is proposed with it."""
        raise NotImplementedError

    def _proposal(self) -> Spec:
        """By what stands already: the run's spec; or, where it has none, the budget that a syncer waits for it with."""
        beginning, url, run, go_on = connecting.Beginning(), self._url, self._given.run, self._life.go_on_joining
        held = connecting.wait_for_spec(partial(self.read_spec, url, run), self.id, go_on)
        if held is None:
            beginning = connecting.wait_for_spec(partial(connecting.read_beginning, url, run), self.id, go_on)
        return proposal(self._proposed(), self._given, held, beginning)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, Stopped):
            self._leave(save_state=True)
        else:
            try:
                self._leave(save_state=isinstance(error, KeyboardInterrupt), error=error)
            except Exception as failure:  # what has ended the loop is what its program has to be told
                structlog.get_logger().error("leaving_failed", learner=self.id, error=repr(failure))

    def close(self, save_state: bool = True) -> None:
        """Publish what is unpublished, flush it within `leave_s`, leave the run; sets `left_in_order`.

        Again, or never opened: nothing happens. One that is joining in another thread gives it up.

        Args:
            save_state: save the optimizer's state for a later incarnation.

        Raises:
            LearnerReplaced: another process took this learner's place meanwhile.
            DilocoError: what its other thread has ended by, if no call has told so before.
            SystemExit: SIGTERM or SIGHUP came, and nobody has asked whether the learner is `finished`.
        """
        failure = self._life.untold_failure
        if self._leave(save_state):
            if failure is not None:  # since the last step, which could not tell
                raise failure
            self._stopping.leave_if_unseen()

    def _leave(self, save_state: bool, error: BaseException | None = None) -> bool:
        """As `close`; whether it was in its run until now. error: that has ended the loop, on this rank alone."""

        def flush(joined: JoinedLearner) -> None:
            if error is not None and joined.breaks_off(error):
                return
            self.left_in_order = joined.leave(self._given.leave_s, save_state)

        return self._life.leave(flush)
