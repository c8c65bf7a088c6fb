"""The exchange thread of one rank, and how it ends, above all with a rank that is gone."""

import os
import threading
from typing import Any

import structlog

from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import RankGone
from diloco.pipeline.process.lifecycle import AGAIN_STATUS
from diloco.workers.background import OwnThread
from diloco.workers.exchange import reaching
from diloco.workers.exchange.exchange_thread import ExchangeThread
from diloco.workers.ranks.found import Meeting
from diloco.workers.ranks.joined import JoinedRank
from diloco.workers.ranks.lines import TcpLines
from diloco.workers.ranks.shares import Shares
from diloco.workers.ranks.wires import Wires
from diloco.workers.ranks.working import Working
from diloco.workers.stopping import Stopping
from diloco.workers.training import Training

NOTICED_S = 10.0
"""A training thread that waits for another rank may wait for ever once the exchange has failed. After so long without
a call of the learner its process is ended; where steps take longer, after `STEPS` of them."""
STEPS = 2
MOST_S = 120.0
"""But no later. One step with an evaluation or a compilation in it weighs in the average for many more, and the
learner is down for as long as this takes; all that is lost sooner is a step that no rank can publish any more."""
ABORT_S = 2.0
"""To break off what is under way."""


class RankThread(ExchangeThread):
    """One rank's."""

    def __init__(
        self, url: str, run: str, training: Training, meeting: Meeting, shares: Shares, stopping: Stopping
    ) -> None:
        super().__init__(url, run, training)
        self._meeting, self._shares, self._stopping = meeting, shares, stopping
        self._log = structlog.get_logger().bind(learner=training.learner, rank=meeting.rank)
        self._noticed = threading.Event()
        self._aborting = OwnThread("abort", meeting.abort)

    def _entered(self, exchange: Any) -> JoinedRank:
        return JoinedRank(self._training, exchange, self, self._meeting, self._shares, self._stopping)

    def notice(self) -> None:
        """As `ExchangeThread`."""
        self._noticed.set()

    def join(self) -> None:
        """As `ExchangeThread`; the ranks part."""
        self.notice()
        if not self.left:
            self._meeting.part()
        super().join()
        if self._aborting.ident is not None:  # as Python ends, a thread that is inside torch would crash it
            self._aborting.join(ABORT_S)
        self._meeting.listener.close()

    def _work(self) -> None:
        super()._work()
        if self.failure is None:
            return
        if isinstance(self.failure, RankGone):
            self._log.error("rank_gone", detail=str(self.failure))
        self._meeting.part()  # the other ranks end too, and training may wait for them
        self._aborting.start()  # it may itself wait
        within_s = max(NOTICED_S, min(MOST_S, STEPS * self._training.times.step_s))
        if not self._noticed.wait(within_s):
            detail = f"{self.failure}; no step has come in {within_s:.3g} s: training may wait for ever: it is ended"
            self._log.error("rank_ended", detail=detail)
            os._exit(AGAIN_STATUS)

    async def _join_and_work(self) -> None:
        meeting, training = self._meeting, self._training
        bus = await reaching.reach(self._url, self._run_name, training.learner)
        try:
            most = max(fragment.elements for fragment in self._shares.layout.fragments)
            wires = Wires(TcpLines(meeting.rank, meeting.addresses, meeting.listener, meeting.token), most)
            given = bus, LoopClock(), wires, training, self._shares, self._joined
            await Working(*given, abandoned=lambda: self._abandoned).work()
        finally:
            await bus.close()
