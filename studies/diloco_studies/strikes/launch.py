"""The launcher of a run that is struck: each process has a way of its own to Redis, and a dead one is started again."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from diloco.launcher.display import Screen
from diloco.launcher.folder import Folder
from diloco.launcher.launch import Child, ChildDied, Children
from diloco.launcher.run import Launcher
from diloco.options import RunProcess
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.view.status import Status
from diloco_studies.strikes.audit import Ending
from diloco_studies.strikes.proxy import Proxy

T = TypeVar("T")

MAX_ENDINGS = 5
"""A process that ends by itself more often than this is not started again: the run is given up."""
READ_S = 30.0
"""Time to read what is left on the bus."""


class StruckLauncher(Launcher):
    """One run under strikes, from its first process to its last."""

    def __init__(
        self,
        settings: RunProcess,
        folder: Folder,
        url: str,
        bus: Bus,
        children: Children,
        screen: Screen,
        others: dict[str, int],
        proxy: Proxy,
    ) -> None:
        super().__init__(settings, folder, url, bus, children, screen, others)
        self._proxy = proxy
        self.under_way = asyncio.Event()
        """All learners train, and something was merged."""
        self.ending = asyncio.Event()
        """The run drains, or is over."""
        self.until_merged: int | None = None
        self.merged_enough = asyncio.Event()
        """That many tokens are merged."""
        self.endings: list[Ending] = []
        """Processes that ended by themselves."""
        self.began_s = self.ended_s = 0.0
        """Unix times: when all was under way, when the drain began."""

    def _url_of(self, name: str) -> str:
        return self._proxy.url(name) if name in self._proxy else self._url

    def _note(self, status: Status) -> None:
        super()._note(status)
        learners = self._children.named("learner-")
        if not self.under_way.is_set() and status["outer_steps"] and all(child.under_way for child in learners):
            self.began_s = time.time()
            self.under_way.set()
        if self.until_merged is not None and status["merged_tokens"] >= self.until_merged:
            self.merged_enough.set()
        if status["phase"] not in ("waiting", Phase.RUNNING) and not self.ending.is_set():
            self.ended_s = time.time()
            self.ending.set()

    async def _check(self, status: Status) -> None:
        """Whoever ended by itself while the run went on is noted, and started again; at the start, it ends the run."""
        training = status["phase"] in ("waiting", Phase.RUNNING)
        for child in self._processes():
            if child.alive or child.expected_end or child.reported:
                continue
            if not training and child.status == 0:
                child.reported = True
                continue
            often = sum(ending.name == child.name for ending in self.endings) >= MAX_ENDINGS
            if training and (often or not self.under_way.is_set()):
                raise ChildDied(child.describe_end())
            self._note_ending(child)
            if training:
                child.restart()

    def _processes(self) -> list[Child]:
        return [child for prefix in ("syncer", "learner-", "evaluator") for child in self._children.named(prefix)]

    def _note_ending(self, child: Child) -> None:
        child.reported = True
        self.endings.append(Ending(child.name, f"{child.ending()}, by no strike; its log: {child.log}"))
        self._screen.note(f"VIOLATION: {child.name} {child.ending()} by itself; last lines:\n{child.tail(5)}")

    async def wind_down(self) -> None:
        """As of any run; who did not end in order is noted."""
        if not self.ended_s:
            self.ended_s = time.time()
        await super().wind_down()
        for child in self._processes():
            if child.status not in (0, AGAIN_STATUS) and not child.reported:
                self._note_ending(child)


async def patiently(call: Callable[..., Awaitable[T]], *args: Any) -> T:
    """The answer of a call to a bus that may have been away: its old connections fail once each.

    Raises:
        BusUnavailable: it is away for long.
    """
    deadline = time.monotonic() + READ_S
    while True:
        try:
            return await call(*args)
        except BusUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
