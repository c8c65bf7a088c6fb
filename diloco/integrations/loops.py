"""A loader that makes your own loop, with Accelerate, Fabric or neither, a learner: it lasts as long as the run.

from diloco.integrations.loops import RunLoader

loader = RunLoader(loader, model, optimizer, run="my-run", tokens="1B")  # after accelerator.prepare
for batch in loader:
    ...  # as before
"""

import atexit
import os
from collections.abc import Callable, Generator, Iterable
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any
from weakref import WeakSet

import structlog

from diloco.integrations.hosted import Host, Hosted, tokens_of, wait_for_leaving
from diloco.pipeline.errors import UsageError
from diloco.workers.stopping import Stopped

# Iterators of all loaders. The references are weak: an unreferenced iterator is closed, and so leaves its run.
PASSES = WeakSet[Generator[Any, None, None]]()


@atexit.register
def close_passes() -> None:
    """Close the iterators that are still held at exit, while the learners' threads still run, so that they leave."""
    for one in list(PASSES):
        try:
            one.close()
        except Stopped:  # the process is ending already
            pass
        except Exception as error:  # the other iterators must be closed all the same
            detail = f"{type(error).__name__}: {error}"
            if getgeneratorstate(one) == GEN_RUNNING:
                detail = "a thread was waiting for its next batch when the program ended: join the thread first"
            structlog.get_logger().warning("pass_not_left", detail=detail)
    wait_for_leaving()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PASSES.clear)  # a forked DataLoader worker must not leave its parent's run


class RunLoader(Host):
    """Yields a loader's batches, epoch after epoch, until the run is finished; then the model has the run's values.

    The tokens of a step are counted in the batches since the step before. If the loop is left earlier, by `break` or by
    an error, the learner leaves the run and the model keeps its own values. The same happens if an iterator of this
    loader is closed or no longer referenced, or when the program ends.
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
        """Check the arguments; nothing is connected before the first batch is requested.

        Args:
            loader: iterable of batches; it is iterated once per epoch.
            model, optimizer: as `Learner` takes them; several optimizers as a list, in the order in which they step.
            step_tokens: tokens that an optimizer step trains, all of its micro-batches together: a number, or a
                function that returns it. Default: counted in the batches (`hosted.tokens_of`); the tokens of a step
                that a GradScaler skips are counted with the next one.
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

    def report_loss(self, loss: Any) -> None:
        """Report the loss of a step for the status, before its `optimizer.step()`: a number or a one-element tensor."""
        self._hosted.report_loss(loss)

    def __iter__(self) -> Generator[Any, None, None]:
        """Return an iterator that joins the run when its first batch is requested. Its `close` leaves the run.

        Raises (at the first batch):
            UsageError: another pass over this loader is under way.
            DilocoError: raised by `Learner`, `open`, `close` or `load_globals`.
        """
        PASSES.add(one := self._pass())
        return one

    def _pass(self) -> Generator[Any, None, None]:
        """Join the run, yield batches, leave. Yield nothing in the epochs after the run's end."""
        if self._over:
            return
        if self._hosted.learner is not None:
            raise UsageError(
                "this loader is being iterated already: close() that iterator before you start another pass, or "
                "iterate over the loader that it wraps"
            )
        self._held, pid = 0, os.getpid()
        with self._hosted.begin(self._model, self._optimizers, self._take_tokens) as learner:
            try:
                while not learner.finished:
                    held = None
                    for held in self._loader:
                        self._held += tokens_of(held) if self._hosted.counts_batches else 0
                        yield held
                        if learner.finished:
                            break
                    if held is None:
                        raise UsageError("the loader is empty")
            except GeneratorExit:  # a `break` or an error in the loop's body: a generator cannot tell them apart
                # In a forked child the learner belongs to the parent; after Ctrl-C it has left already.
                if os.getpid() == pid and self._hosted.learner is not None:
                    self._hosted.drop("its loop ended early")
                raise
            self._over = True
            self._hosted.end("")

    def _take_tokens(self) -> int:
        tokens, self._held = self._held, 0
        return tokens
