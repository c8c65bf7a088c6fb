"""What all integrations do: a learner for as long as somebody else's training lasts.

    made -> begin (the model and its optimizers stand) -> end, leave or give_up -> begin again, as trainers may

After `end` the model has the run's values, so that whatever saves it afterwards saves those. After the other two it
has its own.
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

with naming_extra("diloco.integrations", "learner"):
    from diloco.workers.background import OwnThread
    from diloco.workers.evaluator import Evaluator
    from diloco.workers.learner import Learner
    from diloco.workers.progress_schedule import share_by_progress
    from diloco.workers.stopping import Stopped

INPUTS = ("input_ids", "tokens", "inputs")
"""What batches call their inputs."""
SAY_TOKENS = "say what a step trains: step_tokens=, a number or what is called for it after each step"
LEAVING = WeakSet[threading.Thread]()
"""In each of these a learner leaves that was dropped where nobody could wait."""


def wait_for_leaving() -> None:
    """Until all of them have left: the next learner may have the same state folder."""
    for one in list(LEAVING):
        one.join()


def tokens_of(batch: Any) -> int:
    """What a batch holds: the elements of its inputs if they are whole numbers, such as token ids; else the samples.

    The inputs are what is called `input_ids`, `tokens` or `inputs`, or the first entry of a pair.

    Raises:
        UsageError: it has none of these.
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
        raise UsageError(f"a batch begins with a single number: {SAY_TOKENS}")
    fractions = inputs.is_floating_point() if hasattr(inputs, "is_floating_point") else inputs.dtype.kind == "f"
    return int(inputs.shape[0]) if fractions else math.prod(inputs.shape)


def check_schedule(schedule: Mapping[str, Any] | None) -> None:
    """Check arguments of `Learner.progress_schedule` before there is a learner; None: there are none.

    Raises:
        TypeError: it takes no such argument.
        UsageError: as `share_by_progress`.
    """
    bound = inspect.signature(Learner.progress_schedule).bind(None, None, **(schedule or {}))
    bound.apply_defaults()
    share_by_progress(**bound.kwargs)  # all that it takes beside the optimizer, by name


class Hosted:
    """One trainer's learner. All of it is the training thread's."""

    def __init__(self, step_tokens: int | Callable[[], Any] | None, arguments: Mapping[str, Any]) -> None:
        """Nothing is connected yet.

        Args:
            step_tokens: as `Learner.attach` takes them; None: `begin` says how the trainer's are counted.
            arguments: further ones of `Learner`. All ranks that there are train one model.

        Raises:
            TypeError: `Learner` takes no such argument.
        """
        inspect.signature(Learner).bind(None, None, **arguments)
        self._step_tokens, self._arguments = step_tokens, {"mesh": "world"} | dict(arguments)
        self._loss: Any = None
        self.learner: Learner | None = None
        self.exit_status = 0
        """As the learner's that was last left."""

    @property
    def present(self) -> Learner:
        """The learner.

        Raises:
            UsageError: training has not begun.
        """
        if self.learner is None:
            raise UsageError("there is no learner before training has begun")
        return self.learner

    @property
    def counts_itself(self) -> bool:
        """Nobody said what a step trains: batches are looked at."""
        return self._step_tokens is None

    @contextmanager
    def begin(self, model: Any, optimizers: Sequence[Any], tokens: Callable[[], int]) -> Iterator[Learner]:
        """Join, and count the optimizers' steps from now on; learners of an earlier training leave before.

        What the block raises is an error at the training's start: the learner leaves.

        tokens: of a step, if nobody said; called when its update is made.

        Raises:
            DilocoError: as `Learner`, `open` and `attach`.
        """
        self.give_up()
        wait_for_leaving()
        self.learner = Learner(model, list(optimizers), **self._arguments)
        given = tokens if self._step_tokens is None else self._step_tokens
        try:
            self.learner.open().attach(given, list(optimizers), self._take_loss)
            yield self.learner
        except BaseException:  # KeyboardInterrupt too: else it would stay in the run, and train nothing
            self.give_up()
            raise

    def tell(self, loss: Any) -> None:
        """A loss, to be reported with the next step."""
        self._loss = loss

    def _take_loss(self) -> Any:
        loss, self._loss = self._loss, None
        return loss

    def end(self, longer: str) -> None:
        """Leave as `leave`, and put the run's values into the model.

        Raises:
            DilocoError: as `close` and `load_globals`.
        """
        learner = self.present
        over = self.leave(longer)
        learner.load_globals()
        detail = "the model has the run's values now, and what saves it saves those"
        structlog.get_logger().info("globals_loaded", learner=learner.id, finished=over, detail=detail)

    def leave(self, longer: str) -> bool:
        """Leave; says so where the run is not over. Whether it is.

        longer: how this training could have gone on.

        Raises:
            DilocoError: as `close`.
        """
        learner, self.learner = self.present, None
        over = self._leave(learner, longer)
        self.exit_status = learner.exit_status
        return over

    def drop(self, longer: str) -> None:
        """Leave as `leave`, on whatever thread. One that leaving waits for has another one leave, which shows errors.

        Raises:
            DilocoError: as `close`.
        """
        if isinstance(threading.current_thread(), OwnThread):
            leaving = threading.Thread(target=self._leave_or_end, args=(self.present, longer))
            leaving.start()
            LEAVING.add(leaving)
            self.learner = None  # from now on another thread may begin
        else:
            self.leave(longer)

    @classmethod
    def _leave_or_end(cls, learner: Learner, longer: str) -> None:
        try:
            cls._leave(learner, longer)
        except Stopped as stopped:  # it would end this thread only
            os.kill(os.getpid(), stopped.number)

    @staticmethod
    def _leave(learner: Learner, longer: str) -> bool:
        over, asked = learner.over, learner.finished  # asked before it is closed: a signal counts as seen
        learner.close()
        if over or learner.over:
            return True
        at = f"about {learner.progress:.1%}"  # as its last report was answered; the syncer writes it now and then
        why = "a signal has asked this process to end" if asked else longer
        detail = f"the trainer ended at {at} of the run, which goes on without it: {why}"
        structlog.get_logger().warning("trainer_ended_first", learner=learner.id, detail=detail)
        return False

    def give_up(self, save_state: bool = False) -> None:
        """Leave a training that an error has ended; what is trained is published, and the error stays the one told."""
        if self.learner is not None:
            with suppress(DilocoError, SystemExit):
                self.learner.close(save_state)
            self.learner = None


class HostedCallback:
    """What the callbacks of all trainers have: their arguments, and the learner while it trains."""

    def __init__(
        self,
        *,
        step_tokens: int | Callable[[], Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        evaluator: Evaluator | None = None,
        **learner: Any,
    ) -> None:
        """Nothing is connected before training begins.

        Args:
            step_tokens: trained in an optimizer step, all of its micro-batches together: a number, or what is called
                for it. Default: as the class says.
            schedule: arguments of `Learner.progress_schedule`, by which learning rates go then.
            evaluator: measures the run's model whenever the trainer has evaluated its own.
            learner: arguments of `Learner`: run, tokens (of the whole run), redis_url, state_dir, sync and others.

        Raises:
            TypeError: `Learner` takes no such argument, or `progress_schedule`.
            UsageError: `schedule` is out of bounds.
        """
        check_schedule(schedule)
        self._hosted, self._schedule, self._evaluator = Hosted(step_tokens, learner), schedule, evaluator

    @property
    def learner(self) -> Learner:
        """The `Learner`, while it trains.

        Raises:
            UsageError: it does not.
        """
        return self._hosted.present

    @property
    def exit_status(self) -> int:
        """As `Learner.exit_status`, once training has ended."""
        return self._hosted.exit_status
