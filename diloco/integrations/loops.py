"""A learner in a loop of one's own, with Accelerate, Fabric or neither: its loader lasts as long as the run.

from diloco.integrations.loops import RunLoader

loader = RunLoader(loader, model, optimizer, run="my-run", tokens="1B")  # after accelerator.prepare
for batch in loader:
    ...  # as before
"""

import atexit
import os
from collections.abc import Callable, Generator, Iterable
from inspect import GEN_RUNNING, getgeneratorstate
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import structlog

from diloco.integrations.hosted import Hosted, tokens_of, wait_for_leaving
from diloco.pipeline.errors import UsageError
from diloco.workers.stopping import Stopped

if TYPE_CHECKING:
    from diloco.workers.learner import Learner


PASSES = WeakSet[Generator[Any, None, None]]()
"""Of all loaders, each as long as somebody holds it."""


@atexit.register
def close_passes() -> None:
    """What is still held as the program ends leaves its run; later, the learner's own thread would be gone."""
    for one in list(PASSES):
        try:
            one.close()
        except Stopped:  # it ends already
            pass
        except Exception as error:  # the others are to leave all the same
            detail = f"{type(error).__name__}: {error}"
            if getgeneratorstate(one) == GEN_RUNNING:
                detail = "a thread was waiting for its next batch as the program ended: join it before"
            structlog.get_logger().warning("pass_not_left", detail=detail)
    wait_for_leaving()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PASSES.clear)  # they are the parent's


class RunLoader:
    """A loader's batches, epoch after epoch, until the run is finished; then the model has the run's values.

    What a step trains is counted from the batches since the one before. Leaving the loop earlier, by `break` or by an
    error, leaves the run too; the model keeps its own values. So does whoever drops or closes an iterator of it, or
    holds one as the program ends.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        model: Any,
        optimizer: Any,
        *,
        step_tokens: int | Callable[[], Any] | None = None,
        **learner: Any,
    ) -> None:
        """Nothing is connected before the first batch is asked for.

        Args:
            loader: of batches; it is gone through again and again.
            model, optimizer: as `Learner` takes them; of several optimizers a list, in the order in which they step.
            step_tokens: trained in an optimizer step, all of its micro-batches together: a number, or what is called
                for it. Default: what the batches hold (`hosted.tokens_of`); those of a step that a GradScaler skips
                are counted with the next one.
            learner: arguments of `Learner`: run, tokens (of the whole run), redis_url, state_dir, sync and others.

        Raises:
            TypeError: `Learner` takes no such argument.
        """
        self._loader, self._model = loader, model
        self._optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self._hosted = Hosted(step_tokens, learner)
        self._held = 0
        """Tokens of the batches since the last step."""
        self._over = False

    def tell(self, loss: Any) -> None:
        """The loss of a step, before its `optimizer.step()`: one number, or a tensor of one, shown in the status."""
        self._hosted.tell(loss)

    @property
    def learner(self) -> "Learner":
        """The `Learner`, inside the loop.

        Raises:
            UsageError: outside.
        """
        return self._hosted.present

    @property
    def exit_status(self) -> int:
        """As `Learner.exit_status`, after the loop."""
        return self._hosted.exit_status

    def __iter__(self) -> Generator[Any, None, None]:
        """A pass: it joins when its first batch is asked for, and raises then. Its own `close` leaves the run too.

        Raises:
            UsageError: another pass over this loader is under way.
            DilocoError: as `Learner`, `open`, `close` and `load_globals`.
        """
        PASSES.add(one := self._pass())
        return one

    def _pass(self) -> Generator[Any, None, None]:
        """Join, give batches, leave; nothing in the epochs after the run's end."""
        if self._over:
            return
        if self._hosted.learner is not None:
            raise UsageError(
                "a pass over this loader is under way: close() its iterator to begin another one, and for anything "
                "else go through the plain loader"
            )
        self._held, pid = 0, os.getpid()
        with self._hosted.begin(self._model, self._optimizers, self._take_tokens) as learner:
            try:
                while not learner.finished:
                    held = None
                    for held in self._loader:
                        self._held += tokens_of(held) if self._hosted.counts_itself else 0
                        yield held
                        if learner.finished:
                            break
                    if held is None:
                        raise UsageError("the loader has no batch")
            except GeneratorExit:  # by `break` or by an error of the loop's body: nothing here tells them apart
                if os.getpid() == pid:  # else in a child, where it is the parent's
                    self._hosted.drop("its loop was left before")
                raise
            self._over = True
            self._hosted.end("")

    def _take_tokens(self) -> int:
        tokens, self._held = self._held, 0
        return tokens
