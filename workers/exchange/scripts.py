"""Watch the Lua scripts that a learner calls but may not load, and tell the run if Redis lacks some."""

import asyncio
from contextlib import suppress
from typing import Any

import structlog

from diloco.pipeline.bus.redis_streams import RedisBus
from diloco.pipeline.errors import BusError, ScriptsMissing
from diloco.pipeline.messages.run import SCRIPTS_FOUND, SCRIPTS_MISSING, Event
from diloco.workers.times import TIMES


class Scripts:
    """The state of the scripts on Redis, as one learner last found it."""

    def __init__(self, bus: RedisBus, learner: str) -> None:
        self._bus, self._learner = bus, learner
        self._told_s: float | None = None  # time of the last event that scripts are missing; None: they are there
        self._log: Any = structlog.get_logger().bind(learner=learner)

    async def look(self) -> None:
        """Check that the scripts are there; if that has changed, add an event to the run.

        Raises:
            ScriptsMissing: some are missing.
            BusUnavailable: there is no answer.
        """
        try:
            await self._bus.ensure_scripts()
        except ScriptsMissing:
            now_s = self._bus.clock.now()
            if self._told_s is None or now_s - self._told_s >= TIMES.scripts_told_s:
                await self._tell(SCRIPTS_MISSING)
                self._told_s = now_s
            raise
        if self._told_s is not None:
            await self._tell(SCRIPTS_FOUND)
            self._told_s = None
            self._log.info("scripts_found")

    async def watch(self) -> None:
        """Check periodically until cancelled. Calls that need a missing script log it themselves."""
        while True:
            await asyncio.sleep(TIMES.warn_look_s)
            with suppress(BusError):
                await self.look()

    async def _tell(self, name: str) -> None:
        await self._bus.add_event(Event(name=name, who=self._learner, detail="", unix_s=self._bus.clock.unix()))
