"""The exchange thread of one rank, and how it ends, in particular after another rank is gone."""

import os
import threading
import time
from typing import Any

import structlog
from typing_extensions import override

from diloco.pipeline.errors import RankGone
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.waiting import meanwhile
from diloco.workers.background import OwnThread
from diloco.workers.exchange import redis_access
from diloco.workers.exchange.exchange_thread import ExchangeThread
from diloco.workers.ranks.lines import TcpLines
from diloco.workers.ranks.rank_exchange import Working
from diloco.workers.ranks.rank_learner import JoinedRank
from diloco.workers.ranks.replicas import Samples, sampled
from diloco.workers.ranks.row_ranges import Shares
from diloco.workers.ranks.topology import Meeting
from diloco.workers.ranks.watchdog import RankStopping, waits_s
from diloco.workers.ranks.wires import Wires
from diloco.workers.training import Training

# Seconds that aborting the collectives in flight may take.
ABORT_S = 2.0


class RankThread(ExchangeThread):
    """The exchange thread of one rank."""

    def __init__(
        self, url: str, run: str, training: Training, meeting: Meeting, shares: Shares, stopping: RankStopping
    ) -> None:
        super().__init__(url, run, training)
        self._meeting, self._shares, self._stopping = meeting, shares, stopping
        self._log = structlog.get_logger().bind(learner=training.learner, rank=meeting.rank)
        self._noticed = threading.Event()
        self._aborting = OwnThread("abort", meeting.abort)
        self._working: Working | None = None
        stopping.step_s, stopping.say = lambda: training.times.step_s, self._last_words

    def _entered(self, exchange: Any) -> JoinedRank:
        training, layout = self._training, sampled(self._shares)
        samples = None if layout is None else Samples(training.parameters, layout)
        return JoinedRank(training, exchange, self, self._meeting, self._shares, self._stopping, samples)

    @override
    def notice(self) -> None:
        self._noticed.set()

    def _last_words(self, why: str, within_s: float) -> str:
        """Implement `RankStopping.say`; also wait, within the same time, for a save of the moments in progress."""
        until_s = time.monotonic() + within_s
        try:
            if self._working is not None and self.works:
                return self.ask(self._working.last_words(why, within_s)).result(within_s + 1)
            return why
        finally:
            while self._training.keeper.saves and time.monotonic() < until_s:
                time.sleep(0.05)

    def join(self) -> None:
        """Wait a while for the thread's end, and let go of collectives unless the learner has left (`Meeting.part`)."""
        self.notice()
        if not self.left:
            self._meeting.part()
        super().join()
        if self._aborting.ident is not None:  # a thread inside torch would crash Python's shutdown
            self._aborting.join(ABORT_S)
        self._meeting.listener.close()

    def _work(self) -> None:
        super()._work()
        if self.failure is None:
            return
        if isinstance(self.failure, RankGone):
            self._log.error("rank_gone", detail=str(self.failure))
        # The other ranks end too. The training thread may be waiting for one of them in a collective, for ever:
        # first abort the collectives (in a thread, since an abort may block), then end the process if training does not
        # notice.
        self._meeting.part()
        self._aborting.start()
        within_s = waits_s(self._training.times.step_s)
        if not self._noticed.wait(within_s):
            detail = f"{self.failure}; no step in {within_s:.3g} s: training may wait for ever, so the process ends"
            self._log.error("rank_ended", detail=detail)
            os._exit(AGAIN_STATUS)

    async def _join_and_work(self) -> None:
        meeting, training = self._meeting, self._training
        bus, scripts = await redis_access.reach(self._url, self._run_name, training.learner)
        try:
            most = max(fragment.elements for fragment in self._shares.layout.fragments)
            wires = Wires(TcpLines(meeting.rank, meeting.addresses, meeting.listener, meeting.token), most)
            given = bus, bus.clock, wires, training, self._shares, self._joined
            self._working = Working(*given, abandoned=lambda: self._abandoned)
            async with meanwhile(scripts.watch()):
                await self._working.work()
        finally:
            await bus.close()
