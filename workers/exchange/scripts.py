"""Scripts that a learner calls and may not load: that Redis lacks some is told to whoever watches the run. asyncio."""

import asyncio
from contextlib import suppress
from typing import Any

import structlog

from diloco.pipeline.bus.redis_streams import RedisBus
from diloco.pipeline.errors import BusError, ScriptsMissing
from diloco.pipeline.messages.run import SCRIPTS_FOUND, SCRIPTS_MISSING, Event

LOOK_S = 10.0
TELL_AGAIN_S = 1200.0
"""A run's status goes by what was told in the last hour (`view.trouble`)."""


class Scripts:
    """The scripts on Redis as one learner last found them."""

    def __init__(self, bus: RedisBus, learner: str) -> None:
        self._bus, self._learner = bus, learner
        self._told_s: float | None = None
        """When it was last told that they are missing; None: they are not."""
        self._log: Any = structlog.get_logger().bind(learner=learner)

    async def look(self) -> None:
        """Check that they are there; if that has changed, add an event to the run.

        Raises:
            ScriptsMissing: they are not.
            BusUnavailable: there is no answer.
        """
        try:
            await self._bus.ensure_scripts()
        except ScriptsMissing:
            now_s = self._bus.clock.now()
            if self._told_s is None or now_s - self._told_s >= TELL_AGAIN_S:
                await self._tell(SCRIPTS_MISSING)
                self._told_s = now_s
            raise
        if self._told_s is not None:
            await self._tell(SCRIPTS_FOUND)
            self._told_s = None
            self._log.info("scripts_found")

    async def watch(self) -> None:
        """Look again and again, until cancelled. What is missing is logged by whoever needs it."""
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(BusError):
                await self.look()

    async def _tell(self, name: str) -> None:
        await self._bus.add_event(Event(name=name, who=self._learner, detail="", unix_s=self._bus.clock.unix()))
