"""The thread that does all of a learner's I/O, as the training thread sees it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.clock import LoopClock, fast_loop
from diloco.pipeline.errors import BusError
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.view.status import live_learners
from diloco.workers.background import yield_core
from diloco.workers.device_encoding import OnDevice
from diloco.workers.encoding import AT_ONCE, OnHost
from diloco.workers.exchange import reaching
from diloco.workers.exchange.exchange import Exchange
from diloco.workers.exchange.joining import Joining, meanwhile
from diloco.workers.moments.recovery import Found
from diloco.workers.training import Training

T = TypeVar("T")

LOOK_S = 0.2
JOIN_S = 10.0


class ExchangeThread:
    """An event loop in a thread, with one learner's exchange. All public methods are the training thread's."""

    def __init__(self, url: str, run: str, training: Training) -> None:
        self._url, self._run_name, self._training = url, run, training
        self._loop, self._ended = fast_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
        self._joined: Future[tuple[Exchange, Found]] = Future()
        self._abandoned = False
        """Nothing comes of having joined. Written by the training thread."""
        self.failure: BaseException | None = None
        """What the thread has ended by, if not by `end`. Written by it, once."""

    def join_run(self, check: Callable[[], None]) -> tuple[Exchange, Found]:
        """Begin, and wait until the learner has joined; what works in the thread, and the moments to begin with.

        check: called some times a second; may raise.

        Raises:
            DilocoError: it cannot join.
        """
        self._thread.start()
        while not wait({self._joined}, LOOK_S).done:
            check()
        return self._joined.result()

    def call(self, what: Callable[..., None], *args: Any) -> None:
        """Have the thread call something. One that has failed meanwhile does no more: `failure` says why."""
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(what, *args)

    def ask(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have the thread do something; the answer is cancelled at once if it has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            nothing: Future[T] = Future()
            nothing.cancel()
            return nothing

    def result_of(self, asked: Future[T]) -> T:
        """Wait for an answer.

        Raises:
            CancelledError: the thread has ended before.
        """
        while not wait({asked}, LOOK_S).done:
            if not self._thread.is_alive() and not asked.done():  # what a loop is asked as it closes is never answered
                raise CancelledError
        return asked.result()

    @property
    def works(self) -> bool:
        """It has neither ended nor failed."""
        return self._thread.is_alive() and self.failure is None

    def abandon(self) -> None:
        """Nothing came of joining: the thread says goodbye, closes its bus and ends."""
        self._abandoned = True
        self.end()

    def end(self) -> None:
        """Have it end, with whatever it is doing."""
        self.call(self._ended.set)

    def join(self) -> None:
        """Wait a while until it has ended."""
        if self._thread.ident:
            self._thread.join(JOIN_S)
        else:  # it never began
            self._loop.close()

    # --- inside: the exchange thread ----------------------------------------------------------------------

    def _work(self) -> None:
        yield_core()
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._until_ended())
        except BaseException as error:  # shown to the training thread at its next call
            self.failure = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        finally:
            if not self._joined.done():
                self._joined.set_exception(self.failure or CancelledError())

    async def _until_ended(self) -> None:
        if self._ended.is_set():
            return
        work, ended = asyncio.create_task(self._take_part()), asyncio.create_task(self._ended.wait())
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    async def _take_part(self) -> None:
        """Join, and work until cancelled."""
        training = self._training
        bus = await reaching.reach(self._url, self._run_name, training.learner)
        encoder = OnDevice(training.parameters.device) if training.encode_on_device else OnHost(AT_ONCE)
        who = training.learner, training.incarnation
        joining = Joining(bus, LoopClock(), *who, training.report, encoder=encoder)
        try:
            initial = training.parameters.snapshot
            exchange = await joining.join(training.spec, training.layout, lambda p: initial(p).numpy())
            async with meanwhile(exchange.work()):
                await self._recover_and_help(bus, exchange)
        finally:
            if self._abandoned or not self._joined.done():
                await joining.abandon()
            await bus.close()

    async def _recover_and_help(self, bus: Bus, exchange: Exchange) -> None:
        """The last part of joining, while the exchange follows the heads already; then the same for others."""
        training, shared = self._training, exchange.shared
        recovery, rounds = training.recovery, training.rounds
        peers = recovery.peers(bus, LoopClock(), training.spec.sync.chunk_bytes)
        versions = tuple(base.version for base in shared.adoptions.values())
        found = await recovery.find(peers, versions, shared.state)
        await self._say_joined(bus, versions, shared.state)
        self._joined.set_result((exchange, found))
        if peers is not None:
            await peers.answer(lambda: rounds.steps, recovery.copy)
        await asyncio.Event().wait()

    async def _say_joined(self, bus: Bus, versions: tuple[int, ...], state: RunState | None) -> None:
        training, live = self._training, None
        with suppress(BusError):  # it trains all the same
            live = len(live_learners(await bus.read_reports(), state))
        least, most = min(versions), max(versions)
        structlog.get_logger().info(
            "learner_joined",
            run=self._run_name,
            learner=training.learner,
            incarnation=training.incarnation,
            version=least if least == most else f"{least} to {most}",
            fragments=len(versions),
            learners_live=live,
        )
