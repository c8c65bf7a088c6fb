"""The thread that does all of a learner's I/O: an event loop, and how the training thread reaches it."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, Generic, TypeVar

import structlog

from diloco.pipeline.clock import fast_loop
from diloco.pipeline.errors import UsageError
from diloco.workers.background import OwnThread
from diloco.workers.moments.recovery import FoundMoments
from diloco.workers.times import TIMES
from diloco.workers.training import Training

T = TypeVar("T")
E_co = TypeVar("E_co", covariant=True)


class ExchangeThread(Generic[E_co]):
    """An event loop in a thread, running one learner's exchange. All public methods are for the training thread.

    `joined.LearnerThread` and `ranks.RankThread` implement `_join_and_work`. E_co: the result of joining, an `Exchange`
    or a `Rank`.
    """

    def __init__(self, url: str, run: str, training: Training) -> None:
        self._url, self._run_name, self._training = url, run, training
        self._loop, self._ended = fast_loop(), asyncio.Event()
        self._thread = OwnThread("exchange", self._work)
        self._joined: Future[tuple[E_co, FoundMoments]] = Future()
        # Each of these flags has one writer, so none needs a lock.
        self._abandoned = False  # joining came to nothing; written by the training thread
        self.left = False  # the learner has left its run; written by the training thread
        self.failure: BaseException | None = None  # the error that ended this thread; written by this thread, once

    def start(self, check: Callable[[], None]) -> tuple[E_co, FoundMoments]:
        """Start the thread and wait until the learner has joined; return what it joined as, and the moments found.

        check: called several times per second; may raise.

        Raises:
            DilocoError: the learner cannot join.
        """
        self._thread.start()
        while not wait({self._joined}, TIMES.check_s).done:
            check()
        return self._joined.result()

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
        while not wait({asked}, TIMES.check_s).done:
            # A future that is given to a loop while it closes is never completed, so the thread's end is looked at too.
            if not self.works and not asked.done():
                raise CancelledError
        return asked.result()

    def left_in_order(self, leaving: Future[bool]) -> bool:
        """Wait until the exchange has left; return whether everything was flushed in time. leaving: asked for that.

        Raises:
            DilocoError: the thread failed meanwhile, with this error.
        """
        try:
            in_order = self.result_of(leaving)
        except CancelledError:
            self.join()
            raise self.failure or UsageError("the learner's exchange thread ended before it had left the run") from None
        self.left = True
        if not in_order:
            structlog.get_logger().warning(
                "leave_overrun", learner=self._training.learner, safe="everything that was uploaded"
            )
        return in_order

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
        """Wait for the thread's end, at most `thread_end_s`."""
        if self._thread.ident:
            self._thread.join(TIMES.thread_end_s)
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
        except BaseException as error:  # raised in the training thread at its next call (`BaseLearner.joined`)
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
        """Join the run and complete `_joined`, then work until cancelled."""
        raise NotImplementedError
