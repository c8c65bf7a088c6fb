"""Write a learner's reports: before each header, a few times per second, and on leaving. Runs on asyncio."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from diloco.pipeline.bus.ports import Clock
from diloco.pipeline.messages.run import LearnerReport
from diloco.pipeline.retry import Outages
from diloco.workers.exchange.identity import Identity
from diloco.workers.exchange.shared import Shared
from diloco.workers.exchange.work_queue import ShardClaims
from diloco.workers.times import TIMES


class Reporting:
    """Writes the training side's reports; each answer brings the run's state."""

    def __init__(
        self,
        identity: Identity,
        clock: Clock,
        make: Callable[[bool], LearnerReport],
        outages: Outages,
        shared: Shared,
        claims: ShardClaims,
    ) -> None:
        """make: makes a report when one is due, called with `left`; must not block."""
        self._identity, self._clock, self._make = identity, clock, make
        self._outages, self._shared, self._claims = outages, shared, claims
        self._wake = asyncio.Event()
        self._written_s = 0.0
        self.written = 0  # reports so far
        self.taken_s = 0.0  # when the bus accepted the last one, by the clock
        self.left = False  # True: reports from now on say that the learner has left

    def soon(self) -> None:
        """Ask for a report soon: something has changed that others should learn of."""
        self._wake.set()

    async def write(self) -> LearnerReport:
        """Write a report now.

        Raises:
            LearnerReplaced: another process has the learner's id.
            RunReplaced: another run has begun under the same name.
            BusError: the report may not have been written.
        """
        self._wake.clear()
        self._written_s = self._clock.now()
        self.written += 1
        own = {"number": self.written, "outages": self._outages.count, "pull_s": self._shared.pull_s}
        report = self._make(self.left).model_copy(update=own)
        state, known = await self._identity.write(report), self._shared.state
        if state is not None:  # None: the bus came back empty, and the last known state stays
            if (version := max(report.versions, default=-1)) > 0:
                state.check_same_run(known, self._identity.run, f"Learner {report.learner} has version {version} of")
            self._shared.state = state
        self.taken_s = self._clock.now()
        return report

    async def keep_reporting(self) -> None:
        """Report at intervals until cancelled, and save the position in the shard being read.

        Raises:
            LearnerReplaced, RunReplaced, BusError: see `write`.
        """
        saved: tuple[str, int] | None = None
        while True:
            # The position is taken before the report, so that it never covers data whose training is not reported yet.
            position, began = self._shared.shard_position, self._clock.now()
            await self.write()
            if position is not None and position != saved:
                await self._claims.save(position)
                saved = position
            while (rest_s := began + TIMES.report_s - self._clock.now()) > TIMES.min_report_s:
                if not self._wake.is_set():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(rest_s):
                            await self._wake.wait()
                elif self._clock.now() - self._written_s >= TIMES.min_report_s:
                    break
                else:  # wait a little: a delta may be published meanwhile, whose report tells the news as well
                    await asyncio.sleep(TIMES.min_report_s)
            else:
                await asyncio.sleep(TIMES.min_report_s)
