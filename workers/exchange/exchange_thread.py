"""The thread that does all of a learner's I/O, and the training thread's side of the exchange with it."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.errors import BusError, UsageError
from diloco.pipeline.liveness import live_learners
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.waiting import meanwhile
from diloco.workers.background import OwnThread
from diloco.workers.device_encoding import OnDevice
from diloco.workers.encoding import AT_ONCE, Float32, OnHost
from diloco.workers.exchange import redis_access
from diloco.workers.exchange.exchange import Exchange
from diloco.workers.exchange.joining import Joining
from diloco.workers.moments.recovery import Found
from diloco.workers.rounds import Publication
from diloco.workers.stopping import Stopping
from diloco.workers.training import Training

T = TypeVar("T")

Read = Callable[[Iterable[int]], list[Float32]]  # returns the newest globals (elements,) of these fragments

LOOK_S = 0.2
JOIN_S = 10.0


class ExchangeThread:
    """An event loop in a thread, running one learner's exchange. All public methods are for the training thread."""

    def __init__(self, url: str, run: str, training: Training) -> None:
        self._url, self._run_name, self._training = url, run, training
        self._loop, self._ended = fast_loop(), asyncio.Event()
        self._thread = OwnThread("exchange", self._work)
        self._joined: Future[tuple[Any, Found]] = Future()
        # Each of these flags has one writer, so none needs a lock.
        self._abandoned = False  # joining came to nothing; written by the training thread
        self.left = False  # the learner has left its run; written by the training thread
        self.failure: BaseException | None = None  # the error that ended this thread; written by this thread, once

    def join_run(self, check: Callable[[], None]) -> tuple["JoinedLearner", Found]:
        """Start the thread and wait until the learner has joined; return the joined learner and the moments found.

        check: called several times a second; may raise.

        Raises:
            DilocoError: the learner cannot join.
        """
        self._thread.start()
        while not wait({self._joined}, LOOK_S).done:
            check()
        exchange, found = self._joined.result()
        return self._entered(exchange), found

    def _entered(self, exchange: Any) -> "JoinedLearner":
        """exchange: the result of `_join_and_work`."""
        return JoinedLearner(self._training, exchange, self)

    def call(self, what: Callable[..., None], *args: Any) -> None:
        """Have the thread call a function. A thread that has failed calls nothing any more; see `failure`."""
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(what, *args)

    def ask(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have the thread run a coroutine; return its future, which is cancelled at once if the thread has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            nothing: Future[T] = Future()
            nothing.cancel()
            return nothing

    def result_of(self, asked: Future[T]) -> T:
        """Wait for the result of `ask`.

        Raises:
            CancelledError: the thread ended before there was a result.
        """
        while not wait({asked}, LOOK_S).done:
            # A future that is given to a loop while it closes is never completed, so the thread's end is looked at too.
            if not self.works and not asked.done():
                raise CancelledError
        return asked.result()

    @property
    def works(self) -> bool:
        """True while the thread has neither ended nor failed."""
        return self._thread.is_alive() and self.failure is None

    def notice(self) -> None:
        """Called when the training thread has seen the failure. Does nothing here; `RankThread` overrides it."""

    def abandon(self) -> None:
        """Give up joining: the thread writes a last report, closes its bus and ends."""
        self._abandoned = True
        self.end()

    def end(self) -> None:
        """Make the thread end, whatever it is doing."""
        self.call(self._ended.set)

    def join(self) -> None:
        """Wait for the thread's end, at most `JOIN_S`."""
        if self._thread.ident:
            self._thread.join(JOIN_S)
        else:  # it never began
            self._loop.close()

    def forget(self) -> None:
        """Release the joined exchange, once the thread has ended."""
        self._joined = Future()

    # --- inside: the exchange thread ----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._until_ended())
        except BaseException as error:  # raised in the training thread at its next call (`Life.joined`)
            self.failure = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        finally:
            if not self._joined.done():
                self._joined.set_exception(self.failure or CancelledError())

    async def _until_ended(self) -> None:
        if self._ended.is_set():
            return
        work, ended = asyncio.create_task(self._join_and_work()), asyncio.create_task(self._ended.wait())
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    async def _join_and_work(self) -> None:
        """Join the run, then work until cancelled."""
        training = self._training
        bus, scripts = await redis_access.reach(self._url, self._run_name, training.learner)
        encoder = OnDevice(training.parameters.device) if training.encode_on_device else OnHost(AT_ONCE)
        who = training.learner, training.incarnation
        joining = Joining(bus, bus.clock, *who, training.report, encoder=encoder)
        try:
            initial = training.parameters.snapshot
            exchange = await joining.join(training.spec, training.layout, lambda p: initial(p).numpy())
            async with meanwhile(exchange.work(), scripts.watch()):
                await self._recover_and_help(bus, exchange)
        finally:
            if self._abandoned or not self._joined.done():
                await joining.abandon()
            await bus.close()

    async def _recover_and_help(self, bus: Bus, exchange: Exchange) -> None:
        """Find the optimizer's moments, which completes joining; then answer other learners that look for theirs.

        The exchange follows the heads already meanwhile.
        """
        training, shared = self._training, exchange.shared
        recovery, rounds = training.recovery, training.rounds
        peers = recovery.peers(bus, bus.clock, training.spec.sync.chunk_bytes, lambda: shared.state)
        versions = tuple(base.version for base in shared.adoptions.values())
        found = await recovery.find(peers, versions, shared.state)
        await say_joined(bus, training.learner, training.incarnation, versions, shared.state)
        self._joined.set_result((exchange, found))
        if peers is not None:
            await peers.answer(lambda: rounds.steps, recovery.copy)
        await asyncio.Event().wait()


async def say_joined(bus: Bus, learner: str, incarnation: str, versions: Sequence[int], state: RunState | None) -> None:
    """Log that a learner has joined its run, with its versions and the number of live learners."""
    live = None
    with suppress(BusError):  # the number is only for the log line
        live = len(live_learners(await bus.read_reports(), state))
    least, most = min(versions), max(versions)
    structlog.get_logger().info(
        "learner_joined",
        run=bus.keys.run,
        learner=learner,
        incarnation=incarnation,
        version=least if least == most else f"{least} to {most}",
        fragments=len(versions),
        learners_live=live,
    )


class JoinedLearner:
    """A learner in its run, as the training thread uses it."""

    def __init__(self, training: Training, exchange: Exchange, thread: ExchangeThread) -> None:
        """exchange: runs in `thread`; it is only called through `thread`. Both threads use `exchange.shared`."""
        self.training, self.thread, self.shared = training, thread, exchange.shared
        self._exchange = exchange
        self.late = self.over  # the run was over when it joined, so its training counts for nothing

    @property
    def exchange(self) -> Exchange:
        """The exchange, which runs in its own thread."""
        return self._exchange

    @property
    def over(self) -> bool:
        """True if the run drains or is finished."""
        state = self.shared.state
        return state is not None and state.phase is not Phase.RUNNING

    @property
    def progress(self) -> float:
        """Trained tokens of the whole run / its budget, in 0..1."""
        state = self.shared.state
        return 0.0 if state is None else min(1.0, state.counted_tokens / state.budget_tokens)

    def stepped(self, tokens: int) -> int:
        """Count an inner step, adopt what has arrived, publish what is due; return the tokens to be reported.

        tokens: trained in this step.
        """
        training, shared = self.training, self.shared
        # The order matters: the step is counted on the bases that it was trained on, then bases are replaced, and
        # deltas are taken last, from the bases now in force. So no delta mixes two bases.
        training.rounds.trained(tokens)
        adopted = self.adopt()
        if healed := shared.heal:
            shared.heal = False
            self._heal()
        if shared.offer_again:
            shared.offer_again = False
            training.rounds.offer_again()
        due = training.rounds.publications(shared.windows, shared.uploaded, shared.released)
        self.hand_over(() if healed else due, adopted)  # a healed model equals its bases: there is no delta yet
        return tokens

    def _heal(self) -> None:
        """Reset the parameters to their bases, and the moments to fresh ones if they can be dropped safely.

        The counters are kept: an attempt contains all that was trained on its base, and so will the next one, which can
        be merged.
        """
        for base in self.training.rounds.bases:
            self.training.parameters.overwrite(base.fragment, base.values)
        dropped = self.training.keeper.drop()
        moments = (
            "with fresh moments" if dropped else "and its optimizer keeps its state, which cannot be emptied safely"
        )
        detail = f"it goes on from the globals, {moments}"
        structlog.get_logger().warning("learner_healed", learner=self.training.learner, detail=detail)

    def ended(self, stopping: Stopping) -> bool:
        """Return whether the loop is to be left: the run is over, or the process was asked to end."""
        return stopping.asked or self.over

    def adopt(self) -> bool:
        """Overwrite the fragments for which newer globals have arrived; return whether there were any."""
        adoptions, training = self.shared.adoptions, self.training
        # `in_part` comes before the adoptions, since it counts by the bases of the previous part of the run. The
        # exchange stores the state of a new part before it stores globals of that part (`Pulling.look`).
        arrived = sorted(adoptions)
        training.rounds.in_part(self.shared.state)
        for p in arrived:
            base = adoptions.pop(p)
            training.parameters.overwrite(p, base.values)
            training.rounds.adopt(base)
        return bool(arrived)

    def newest(self, read: Read) -> list[Float32]:
        """Return this process's part of the newest global of each fragment. read: reads whole fragments now."""
        return read(range(len(self.training.layout.fragments)))

    def hand_over(self, publications: Iterable[Publication], adopted: bool) -> None:
        """Snapshot what is to be published and pass it to the exchange, all of a step at once: waking its thread costs.

        adopted: fragments were adopted in this step, which others should learn soon.
        """
        items = [(publication, self._snapshot(publication.base.fragment)) for publication in publications]
        if items or adopted:
            self.thread.call(self._told, items, adopted)

    def _told(self, items: list[tuple[Publication, Callable[[], Any]]], adopted: bool) -> None:
        """Take over what `hand_over` passes on; runs in the exchange's thread."""
        if items:
            self.exchange.publishing.queue(items)
        if adopted:
            self.exchange.reporting.soon()

    def _snapshot(self, p: int) -> Callable[[], Any]:
        """Return a snapshot of a fragment, in the form that the encoder takes."""
        training = self.training
        return training.parameters.on_device(p) if training.encode_on_device else training.parameters.snapshot(p).numpy

    def breaks_off(self, error: BaseException) -> bool:
        """Return whether this error of the loop ends the learner without `leave`; ranks cannot leave one by one."""
        return False

    def leave(self, within_s: float, save_state: bool) -> bool:
        """Publish what is unpublished, flush it, say goodbye; return whether everything was flushed in time.

        This holds even if an error has ended the training: what was trained until then counts.

        Raises:
            LearnerReplaced: another process took this learner's place meanwhile.
        """
        training, over, whole = self.training, self.over, True
        for publication in training.rounds.last(self.shared.windows, due=over):
            try:
                self.hand_over([publication], adopted=False)
            except Exception as error:  # the model was changed, or its device has failed or has no room for a copy
                whole = False
                structlog.get_logger().warning("last_delta_withheld", learner=training.learner, error=str(error))
        leaving = self.thread.ask(self.exchange.leave(within_s))
        training.keeper.close(self.shared, save_state, within_s)
        return self._left(leaving) and whole

    def forget(self) -> None:
        """Release the bases and residuals of a learner that has left, once its thread has ended."""
        self.training.rounds.forget()
        self.shared.adoptions.clear()
        self.thread.forget()
        del self._exchange

    def _left(self, leaving: "Future[bool]") -> bool:
        """Wait until the exchange has left; return and raise as `leave` does."""
        try:
            in_order = self.thread.result_of(leaving)
        except CancelledError:  # the thread failed meanwhile
            self.thread.join()
            raise self.thread.failure or UsageError("the learner's exchange thread ended before it had left") from None
        self.thread.left = True
        if not in_order:
            structlog.get_logger().warning("leave_overrun", learner=self.training.learner, safe="all that was uploaded")
        return in_order
