"""A learner in its run, as its training thread uses it: count, adopt, snapshot, hand over; and its exchange thread.

Theory of operation. Two threads work for a learner, and the training thread never waits for the other one, except when
it joins and leaves.

| thread | owns |
|---|---|
| training | the model, its optimizer, and `Training`: counters, parameters, the moments' keeper |
| exchange | the bus, and `Exchange`: queued deltas, bases, encoding errors, reports, shards |

They meet in three places. `Shared` needs no lock, since each of its fields has one writer, or one thread that sets it
and one that takes it. `ExchangeThread.call` passes deltas on. For reports, the exchange thread reads what the training
thread replaces as a whole: the counters of `Rounds`, versions, losses and times.

A delta's way from `Learner.step` to the bus leads through five objects: `JoinedLearner` orders a step, `Rounds` decides
what is published, `ExchangeThread` carries the snapshot over, `Publishing` sends the header, and a `Carrier` encodes
and sends the payload. A carrier is one process's, or the ranks' (`ranks.rank_carrier`).
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.waiting import in_background
from diloco.workers.encoding import Float32, Snapshot
from diloco.workers.exchange import redis_access
from diloco.workers.exchange.exchange import Exchange
from diloco.workers.exchange.exchange_thread import ExchangeThread
from diloco.workers.exchange.joining import Joining, log_joined
from diloco.workers.moments.recovery import FoundMoments
from diloco.workers.rounds import Publication
from diloco.workers.training import Training

Read = Callable[[Iterable[int]], list[Float32]]  # returns the newest globals (elements,) of these fragments


def is_over(state: RunState | None) -> bool:
    """Return whether a run drains or is finished."""
    return state is not None and state.phase is not Phase.RUNNING


def progress_of(state: RunState | None) -> float:
    """Return the trained tokens of a whole run / its budget, in 0..1."""
    return 0.0 if state is None else min(1.0, state.counted_tokens / state.budget_tokens)


class JoinedLearner:
    """A learner in its run, for the training thread."""

    def __init__(self, training: Training, exchange: Exchange[Snapshot], thread: ExchangeThread[object]) -> None:
        """exchange: runs in `thread`; it is only called through `thread`. Both threads use `exchange.shared`."""
        self.training, self.thread, self.shared, self.exchange = training, thread, exchange.shared, exchange
        self.late = self.over  # True if the run was over already when it joined; then its training counts for nothing

    @property
    def over(self) -> bool:
        """True if the run drains or is finished."""
        return is_over(self.shared.state)

    @property
    def progress(self) -> float:
        """Trained tokens of the whole run / its budget, in 0..1."""
        return progress_of(self.shared.state)

    def stepped(self, tokens: int) -> int:
        """Count an inner step, adopt what has arrived, publish what is due; return the tokens to be reported.

        tokens: trained in this step.
        """
        rounds, shared = self.training.rounds, self.shared
        # The order matters: the step is counted on the bases that it was trained on, then bases are replaced, and
        # deltas are taken last, from the bases now in force. So no delta mixes two bases.
        rounds.trained(tokens)
        adopted = self.adopt()
        if healed := shared.heal:
            self._heal()
            shared.heal = False
        if shared.offer_again:
            shared.offer_again = False
            rounds.offer_again()
        publications = rounds.publications(shared.windows, shared.uploaded, shared.released)
        # A healed model equals its bases, so there is no delta yet. The iterator is lazy: what is not taken from it
        # does not count as published.
        self.hand_over(() if healed else publications, adopted)
        return tokens

    def _heal(self) -> None:
        """Reset the parameters to their bases, and the moments to fresh ones if they can be dropped safely.

        The counters are kept, since the tokens published on one base may only grow (the ledger counts the largest). So
        the next delta of each base is weighted by what was thrown away too.
        """
        for base in self.training.rounds.bases:
            self.training.parameters.overwrite(base.fragment, base.values)
        dropped = self.training.keeper.drop()
        moments = (
            "with fresh moments" if dropped else "and its optimizer keeps its state, which cannot be cleared safely"
        )
        detail = f"it continues from the globals, {moments}"
        structlog.get_logger().warning("learner_healed", learner=self.training.learner, detail=detail)

    def adopt(self) -> bool:
        """Overwrite the fragments for which newer globals have arrived; return whether there were any."""
        adoptions, training = self.shared.adoptions, self.training
        # The order matters. `in_part` comes before the adoptions, since it counts by the bases of the previous part of
        # the run. What has arrived is listed before the state is read: the exchange stores the state of a new part
        # before it stores globals of that part (`Pulling.look`).
        arrived = sorted(adoptions)
        training.rounds.in_part(self.shared.state)
        for p in arrived:
            base = adoptions.pop(p)
            try:
                training.parameters.overwrite(p, base.values)
            except BaseException:  # such as a lack of memory, which a loop may survive: try again at the next step
                adoptions.setdefault(p, base)  # unless a newer one has arrived
                raise
            training.rounds.adopt(base)
        return bool(arrived)

    def newest(self, read: Read) -> list[Float32]:
        """Return this process's part of the newest global of each fragment. read: reads whole fragments now."""
        return read(range(len(self.training.layout.fragments)))

    def hand_over(self, publications: Iterable[Publication], adopted: bool) -> None:
        """Snapshot what will be published and pass it to the exchange, all of a step at once: waking its thread costs.

        adopted: fragments were adopted in this step, which others should learn soon.
        """
        training = self.training
        snapshot = training.on_device or (lambda p: training.parameters.snapshot(p).numpy)
        items = list[tuple[Publication, Snapshot]]()
        try:
            for publication in publications:
                try:
                    items.append((publication, snapshot(publication.base.fragment)))
                except BaseException:
                    training.rounds.not_copied(publication)
                    raise
        finally:  # even after an error: what has been copied counts as published
            if items or adopted:
                self.thread.call(self.exchange.publishing.queue, items, adopted)

    def abort(self, error: BaseException) -> bool:
        """Return whether this error of the loop ends the learner without `leave`; ranks cannot leave one by one."""
        return False

    def leave(self, within_s: float, save_state: bool) -> bool:
        """Publish what is unpublished, flush it, say goodbye; return whether everything was flushed in time.

        This holds even if an error has ended the training: what was trained until then counts.

        Raises:
            LearnerReplaced: another process took this learner's place meanwhile.
        """
        training, whole = self.training, True
        for publication in training.rounds.last(self.shared.windows, due=self.over):
            try:  # one by one: a fragment that cannot be copied keeps no other from going out
                self.hand_over([publication], adopted=False)
            except Exception as error:  # the model was changed, or its device has failed or has no memory for a copy
                whole = False
                structlog.get_logger().warning("last_delta_withheld", learner=training.learner, error=str(error))
        # The exchange flushes while this thread saves the moments.
        leaving = self.thread.ask(self.exchange.leave(within_s))
        training.keeper.close(self.shared, save_state, within_s)
        return self.thread.left_in_order(leaving) and whole

    def forget(self) -> None:
        """Release the bases and residuals of a learner that has left, once its thread has ended."""
        self.training.rounds.forget()
        self.shared.adoptions.clear()
        self.thread.forget()
        del self.exchange


class LearnerThread(ExchangeThread[Exchange[Snapshot]]):
    """The exchange thread of a learner that is one process."""

    def join_run(self, check: Callable[[], None]) -> tuple[JoinedLearner, FoundMoments]:
        """Join, as `ExchangeThread.start` does; return the joined learner and the moments found."""
        exchange, found = self.start(check)
        return JoinedLearner(self._training, exchange, self), found

    async def _join_and_work(self) -> None:
        training = self._training
        who = training.learner, training.incarnation
        bus, scripts = await redis_access.reach(self._url, self._run_name, training.learner)
        joining = Joining(bus, bus.clock, *who, training.report, encoder=training.encoder)
        try:
            initial = training.parameters.snapshot
            exchange = await joining.join(training.spec, training.layout, lambda p: initial(p).numpy())
            async with in_background(exchange.work(), scripts.watch()):  # from here on the exchange follows the heads
                shared, recovery = exchange.shared, training.recovery
                peers = recovery.peers(bus, bus.clock, training.spec.sync.chunk_bytes, lambda: shared.state)
                versions = tuple(base.version for base in shared.adoptions.values())
                found = await recovery.find(peers, versions, shared.state)
                await log_joined(bus, *who, versions, shared.state)
                self._joined.set_result((exchange, found))
                if peers is not None:
                    await peers.answer(lambda: training.rounds.steps, recovery.copy)
                await asyncio.Event().wait()
        finally:
            if self._abandoned or not self._joined.done():
                await joining.abandon()
            await bus.close()
