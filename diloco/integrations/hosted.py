"""The common part of all integrations: a learner that lives as long as another library's training.

    made -> begin (the model and its optimizers exist) -> end, leave or give_up -> begin again, as trainers may

After `end` the model has the run's values, so that a trainer that saves it afterwards saves those. After `leave` and
`give_up` it has its own values.
"""

import inspect
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import structlog

from diloco.extras import naming_extra
from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.process.interrupts import left_just_now, off_interrupt, on_interrupt

with naming_extra("diloco.integrations", "learner"):
    from diloco.workers.background import OwnThread
    from diloco.workers.evaluator import Evaluator
    from diloco.workers.learner import Learner
    from diloco.workers.progress_schedule import share_by_progress
    from diloco.workers.stopping import Stopped

# Keys under which batches have their inputs.
INPUTS = ("input_ids", "tokens", "inputs")
SAY_TOKENS = "pass the tokens of a step: step_tokens= takes a number, or a function that is called after each step"
# Threads in which dropped learners leave their runs, because the thread that dropped them could not wait (`drop`).
LEAVING = WeakSet[threading.Thread]()


def wait_for_leaving() -> None:
    """Wait until all dropped learners have left: the next learner may use the same state folder."""
    for one in list(LEAVING):
        one.join()


def tokens_of(batch: Any) -> int:
    """Count the tokens of a batch: the elements of its inputs if these are integers, like token ids; else its samples.

    The inputs are the entry `input_ids`, `tokens` or `inputs` of a mapping, or the first entry of a list or tuple.

    Raises:
        UsageError: the batch has no such inputs.
    """
    inputs = batch
    while not hasattr(inputs, "shape"):
        if isinstance(inputs, Mapping) and any(name in inputs for name in INPUTS):
            inputs = next(inputs[name] for name in INPUTS if name in inputs)
        elif isinstance(inputs, list | tuple) and inputs:
            inputs = inputs[0]
        else:
            raise UsageError(f"a batch is a {type(batch).__name__} without {', '.join(INPUTS)}: {SAY_TOKENS}")
    if not inputs.shape:
        raise UsageError(f"the first item of a batch is a single number: {SAY_TOKENS}")
    fractions = inputs.is_floating_point() if hasattr(inputs, "is_floating_point") else inputs.dtype.kind == "f"
    return int(inputs.shape[0]) if fractions else math.prod(inputs.shape)


def check_schedule(schedule: Mapping[str, Any] | None) -> None:
    """Check arguments of `Learner.progress_schedule` before there is a learner; None: there are none.

    Raises:
        TypeError: it takes no such argument.
        UsageError: an argument is out of bounds (`share_by_progress`).
    """
    bound = inspect.signature(Learner.progress_schedule).bind(None, None, **(schedule or {}))
    bound.apply_defaults()
    share_by_progress(**bound.kwargs)  # the same arguments by name, except for the optimizer


class Hosted:
    """The learner of one trainer. All its methods are called on the training thread, except for `drop`."""

    def __init__(self, step_tokens: int | Callable[[], Any] | None, arguments: Mapping[str, Any]) -> None:
        """Check the arguments; nothing is connected yet.

        Args:
            step_tokens: tokens of a step, as `Learner.attach` takes them; None: the function of `begin` counts them.
            arguments: further arguments of `Learner`. By default all ranks of the process group train one model.

        Raises:
            TypeError: `Learner` takes no such argument.
        """
        inspect.signature(Learner).bind(None, None, **arguments)
        self._step_tokens, self._arguments = step_tokens, {"mesh": "world"} | dict(arguments)
        self._loss: Any = None
        self.learner: Learner | None = None
        self.exit_status = 0
        """Exit status of the learner that left last."""

    @property
    def present(self) -> Learner:
        """The learner of the training that is under way.

        Raises:
            UsageError: training has not begun.
        """
        if self.learner is None:
            raise UsageError("the learner exists only once training has begun")
        return self.learner

    @property
    def counts_batches(self) -> bool:
        """Return whether the integration counts tokens from the batches, because `step_tokens` was not given."""
        return self._step_tokens is None

    @contextmanager
    def begin(self, model: Any, optimizers: Sequence[Any], tokens: Callable[[], int]) -> Iterator[Learner]:
        """Join the run and count the optimizers' steps from now on; learners of an earlier training leave first.

        The block is the start of training: if it raises, the learner leaves the run.

        tokens: counts the tokens of a step, if `step_tokens` was not given; called when the step's update is made.

        Raises:
            DilocoError: raised by `Learner`, `open` or `attach`.
        """
        self.give_up()
        wait_for_leaving()
        self.learner = Learner(model, list(optimizers), **self._arguments)
        given = tokens if self._step_tokens is None else self._step_tokens
        try:
            self.learner.open().attach(given, list(optimizers), self._take_loss)
            on_interrupt(self.give_up)
            yield self.learner
        except BaseException as error:  # KeyboardInterrupt too: else the learner stays in the run without training
            self.give_up(error)
            raise

    def report_loss(self, loss: Any) -> None:
        """Set the loss that is reported with the next step."""
        self._loss = loss

    def _take_loss(self) -> Any:
        loss, self._loss = self._loss, None
        return loss

    def end(self, longer: str) -> bool:
        """Leave the run (`leave`), and put the run's values into the model; return whether the run is over.

        Raises:
            DilocoError: raised by `close` or `load_globals`.
        """
        learner = self.present
        over = self.leave(longer)
        learner.load_globals()
        detail = "the model now has the run's values"
        structlog.get_logger().info("globals_loaded", learner=learner.id, finished=over, detail=detail)
        return over

    def leave(self, longer: str) -> bool:
        """Leave the run and return whether it is over; log a warning if it is not.

        longer: advice for the warning: how this training could have lasted longer.

        Raises:
            DilocoError: raised by `close`.
        """
        learner, self.learner = self.present, None
        off_interrupt(self.give_up)
        over = self._leave(learner, longer)
        self.exit_status = learner.exit_status
        return over

    def drop(self, longer: str) -> None:
        """Leave the run from any thread, even when the garbage collector closes an iterator there.

        Leaving waits for the learner's own thread. If this is that thread, a new thread leaves instead, and prints its
        errors.

        Raises:
            DilocoError: raised by `close`.
        """
        if isinstance(threading.current_thread(), OwnThread):
            off_interrupt(self.give_up)
            leaving = threading.Thread(target=self._leave_or_end, args=(self.present, longer))
            leaving.start()
            LEAVING.add(leaving)
            self.learner = None  # last: from now on another thread may begin, and it waits for LEAVING
        else:
            self.leave(longer)
            left_just_now()  # it may be Ctrl-C that has closed the iterator: then it leaves no traceback

    @classmethod
    def _leave_or_end(cls, learner: Learner, longer: str) -> None:
        try:
            cls._leave(learner, longer)
        except Stopped as stopped:  # a SystemExit ends only this thread, so the signal is sent to the process again
            os.kill(os.getpid(), stopped.number)

    @staticmethod
    def _leave(learner: Learner, longer: str) -> bool:
        over, asked = learner.over, learner.finished  # read before close(), after which a signal counts as handled
        learner.close()
        if over or learner.over:
            return True
        at = f"about {learner.progress:.1%}"  # of the last answered report: progress is written now and then
        why = "a signal asked this process to stop" if asked else longer
        detail = f"the trainer ended at {at} of the run, which continues without it: {why}"
        structlog.get_logger().warning("trainer_ended_first", learner=learner.id, detail=detail)
        return False

    def give_up(self, error: BaseException | None = None, in_order: bool = False) -> None:
        """Leave the run after an error, as at the end of a learner's `with` block; only this error is shown.

        Args:
            error: None if it is not known.
            in_order: all ranks of the learner do so after the same step, since they were asked to end.
        """
        learner, self.learner = self.learner, None
        off_interrupt(self.give_up)
        if learner is not None:
            with suppress(DilocoError, SystemExit):
                if error is not None and not in_order:
                    learner.__exit__(type(error), error, error.__traceback__)
                    return
                try:
                    learner.close(save_state=in_order)
                except Exception as failure:  # only logged: the program must see the error that has ended its loop
                    structlog.get_logger().error("leaving_failed", learner=learner.id, error=repr(failure))


class Host:
    """Base of callbacks and loaders, which have a learner while they train."""

    _hosted: Hosted

    @property
    def learner(self) -> Learner:
        """The `Learner`, while it trains.

        Raises:
            UsageError: there is no training under way.
        """
        return self._hosted.present

    @property
    def exit_status(self) -> int:
        """`Learner.exit_status` of the last training that has ended."""
        return self._hosted.exit_status


class HostedCallback(Host):
    """Base of the callbacks for trainers: takes their arguments, and has the learner while it trains."""

    def __init__(
        self,
        *,
        step_tokens: int | Callable[[], Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        evaluator: Evaluator | None = None,
        **learner: Any,
    ) -> None:
        """Check the arguments; nothing is connected before training begins.

        Args:
            step_tokens: tokens that an optimizer step trains, all of its micro-batches together: a number, or a
                function that returns it. Default: see the class.
            schedule: arguments of `Learner.progress_schedule`, which then sets the learning rates.
            evaluator: measures the run's model whenever the trainer has evaluated its own, and once the run is over.
            learner: arguments of `Learner`: run, tokens (of the whole run), redis_url, state_dir, sync and others.

        Raises:
            TypeError: `Learner` or `progress_schedule` takes no such argument.
            UsageError: an argument of `schedule` is out of bounds.
        """
        check_schedule(schedule)
        self._hosted, self._schedule, self._evaluator = Hosted(step_tokens, learner), schedule, evaluator

    def _end(self, longer: str) -> None:
        if self._hosted.end(longer) and self._evaluator is not None:
            try:
                self._evaluator.evaluate()  # the trainer has evaluated before the last merges
            except Exception as error:  # only logged: the training has succeeded, and its model is yet to be saved
                structlog.get_logger().error("evaluation_failed", error=repr(error))
