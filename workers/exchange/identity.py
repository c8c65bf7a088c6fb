"""Ensure that one process at a time has a learner's id: a latecomer is refused, a replaced one ends. Runs on asyncio.

| the last process with this id                | the new process                                             |
|----------------------------------------------|-------------------------------------------------------------|
| none, has left, or silent for `live_s`       | is the next generation, at once                             |
| reported lately, silent while it is watched  | is the next generation after `id_silent_s` (it was killed)  |
| reports while it is watched                  | is refused: `IdTaken`                                       |

The first report of a generation takes the id on the bus. From then on the bus refuses reports of older generations, so
a process that wakes from a pause, or was cut off for long, ends (`LearnerReplaced`). Reports carry their generation: a
bus that comes back empty, or with the data of a second before, learns the order again from the processes that report.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from diloco.pipeline.bus.ports import Clock, Reports
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import IdTaken, LearnerReplaced
from diloco.pipeline.messages.run import LearnerReport, RunState, SeenReport
from diloco.workers.times import TIMES

MAX_GENERATIONS = 10**9
# So many new reports prove that a process lives: one or two may be late calls of a dead one.
HEARD = 3

# Incarnations made in this process, for example by the cells of a notebook -> its pid. A forked child inherits the
# dictionary, and can tell by the pid that they are not its own.
_HERE: dict[str, int] = {}

Retry = Callable[..., Awaitable[Any]]


class Identity:
    """One incarnation's hold on its learner's id."""

    def __init__(self, bus: Reports, clock: Clock, learner: str, incarnation: str, retry: Retry) -> None:
        """retry: calls a function again until the bus answers."""
        self._bus, self._clock, self._learner, self._incarnation = bus, clock, learner, incarnation
        self.run = bus.keys.run
        self._retry = retry
        _HERE[incarnation] = os.getpid()
        self._generation, self._taken = 0, False

    async def acquire(self, write: Callable[[], Awaitable[Any]]) -> None:
        """Wait until it is clear that no live process uses the id, and take it.

        write: writes a report, by calling `self.write`. If two processes begin at once, the report of one is refused,
        and that process looks again.

        Raises:
            IdTaken: a live process uses it.
        """
        least = 1
        while not self._taken:
            self._generation = max(least, await self._next_generation())
            try:
                await self._retry(write)
                self._taken = True
            except LearnerReplaced as quicker:
                least = quicker.generation + 1

    async def write(self, report: LearnerReport) -> RunState | None:
        """Write a report as the holder of the id; return the run's state.

        Raises:
            LearnerReplaced: another process has the id now.
            BusError: the report may not have been written.
        """
        try:
            return await self._bus.write_report(report.model_copy(update={"generation": self._generation}))
        except LearnerReplaced as error:
            if not self._taken:
                raise
            seen = await self._retry(self._newest)
            raise LearnerReplaced(
                f"{_who(seen)} has replaced learner {self._learner!r}{_described(seen)}. This one was silent for too "
                "long (paused, or cut off from Redis) and is stopping; what it has trained since is lost",
                error.generation,
            ) from None

    async def _next_generation(self) -> int:
        heard, last, quiet_since = 0, None, self._clock.now()
        while True:
            seen: SeenReport | None = await self._retry(self._newest)
            if seen is None:
                return 1
            told = (seen.report.incarnation, seen.report.number)
            if told != last:
                heard, last, quiet_since = heard + (last is not None), told, self._clock.now()
            if heard >= HEARD:
                raise IdTaken(
                    f"{_who(seen)} is already learner {self._learner!r}{_described(seen)}. Stop that one (in a "
                    "program with `Learner.close()`), or start this one under another id (--learner-id, learner_id=), "
                    "or without an id: then it gets a random one"
                )
            if seen.report.left or seen.age_s > BUS_TIMES.live_s or self._clock.now() - quiet_since > TIMES.id_silent_s:
                return seen.report.generation + 1
            await asyncio.sleep(TIMES.poll_s)

    async def _newest(self) -> SeenReport | None:
        """Return the newest report of another incarnation with this id, by generation and then by age."""
        others = [seen for seen in await self._bus.read_reports() if seen.report.learner == self._learner]
        others = [seen for seen in others if seen.report.incarnation != self._incarnation]
        others = [seen for seen in others if seen.report.generation < MAX_GENERATIONS]  # more were made up
        return max(others, key=lambda seen: (seen.report.generation, -seen.age_s), default=None)


def _who(seen: SeenReport | None) -> str:
    here = seen is not None and _HERE.get(seen.report.incarnation) == os.getpid()
    return "another Learner in this process" if here else "another process"


def _described(seen: SeenReport | None) -> str:
    if seen is None:
        return ""
    one = seen.report
    return f" (incarnation {one.incarnation} on host {one.host}, reported {seen.age_s:.1f} s ago at step {one.step})"
