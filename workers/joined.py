"""A learner that has joined, from its first step to its last: what its training thread does beside training."""

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from typing import Any

import structlog

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.run import Phase
from diloco.workers.exchange.exchange import Exchange
from diloco.workers.exchange.exchange_thread import ExchangeThread
from diloco.workers.rounds import Publication
from diloco.workers.training import Training


class JoinedLearner:
    """A learner in its run. The training thread's."""

    def __init__(self, training: Training, exchange: Exchange, thread: ExchangeThread) -> None:
        """exchange: works in `thread`, and is only told what to do there; `exchange.shared` is for both threads."""
        self.training, self.exchange, self.thread = training, exchange, thread
        self.shared = exchange.shared

    @property
    def over(self) -> bool:
        """The run drains, or is finished."""
        state = self.shared.state
        return state is not None and state.phase is not Phase.RUNNING

    @property
    def progress(self) -> float:
        """Trained tokens of the whole run / its budget, in 0..1."""
        state = self.shared.state
        return 0.0 if state is None else min(1.0, state.tokens / state.budget_tokens)

    def adopt(self) -> bool:
        """Overwrite the fragments of which newer globals have arrived; whether there are any."""
        adoptions, training = self.shared.adoptions, self.training
        arrived = sorted(adoptions)
        for p in arrived:
            base = adoptions.pop(p)
            training.parameters.overwrite(p, base.values)
            training.rounds.adopt(base)
        return bool(arrived)

    def hand_over(self, publications: Iterable[Publication], adopted: bool) -> None:
        """Snapshot what is to be published and tell the exchange; waking its thread costs, so once a step."""
        items = [(publication, self._snapshot(publication.base.fragment)) for publication in publications]
        if items or adopted:
            self.thread.call(self.exchange.queue, items, adopted)

    def _snapshot(self, p: int) -> Callable[[], Any]:
        """What the encoder takes."""
        training = self.training
        return training.parameters.on_device(p) if training.encode_on_device else training.parameters.snapshot(p).numpy

    def leave(self, within_s: float, save_state: bool) -> bool:
        """Publish what is unpublished, flush it, say goodbye; whether all of it was in time.

        Raises:
            LearnerReplaced: another process took this learner's place meanwhile.
        """
        training, over = self.training, self.over
        for publication in training.rounds.last(self.shared.windows, due=over):
            try:
                self.hand_over([publication], adopted=False)
            except UsageError as error:  # the model has changed
                structlog.get_logger().warning("last_delta_withheld", learner=training.learner, error=str(error))
        leaving = self.thread.ask(self.exchange.leave(within_s))
        training.keeper.close(self.shared, save_state and not over, within_s)
        try:
            in_order = self.thread.result_of(leaving)
        except CancelledError:  # the thread failed meanwhile
            self.thread.join()
            raise self.thread.failure or UsageError("the learner's own thread ended before it had left") from None
        if not in_order:
            structlog.get_logger().warning("leave_overrun", learner=training.learner, safe="all that was uploaded")
        return in_order
