"""When a syncer saves checkpoints: while the run lasts, when it is told to stop, when the run is finished. asyncio."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from diloco.pipeline.errors import PeerError, UsageError
from diloco.pipeline.messages.run import RunState
from diloco.syncer.checkpoint import is_saved, save_checkpoint
from diloco.syncer.context import SyncerContext
from diloco.syncer.serving.closing import POLL_S
from diloco.syncer.serving.leases import holding


class Checkpoints:
    """One syncer's, in its folder."""

    def __init__(self, context: SyncerContext, directory: Path, lease_s: float) -> None:
        self._context, self._bus, self._directory, self._lease_s = context, context.bus, directory, lease_s
        self.problem = ""
        """Why the last one could not be saved, in words for the status."""
        self.in_order = True
        """False once the last one, on stopping or at the end, could not be saved."""
        self._log = structlog.get_logger()

    async def keep(self, every_s: float, leads: Callable[[], bool]) -> None:
        """Save one every so often, while this syncer leads."""
        while True:
            await asyncio.sleep(every_s)
            if leads():
                await self._save()

    async def save_stopped(self) -> None:
        """The checkpoint of a syncer that is told to stop, if the run has begun."""
        if all(await self._bus.read_heads(range(self._fragments))):
            self.in_order = await self._save()

    async def save_finished(self, state: RunState) -> None:
        """The last checkpoint, unless another syncer saved it there: one after the other, whoever is left."""
        if len(state.manifest) < self._fragments:
            return  # it was stopped before all fragments had a version
        nonce = self._context.nonce
        while not await self._bus.acquire_lease(0, nonce, self._lease_s):  # noqa: ASYNC110  # on the bus
            await asyncio.sleep(min(POLL_S, self._lease_s / 3))
        async with holding(self._bus, [0], nonce, self._lease_s):
            if not await self._context.offload(is_saved, self._directory, state):
                self.in_order = await self._save()
        await self._bus.release_lease(0, nonce)

    @property
    def _fragments(self) -> int:
        return len(self._context.layout.fragments)

    async def _save(self) -> bool:
        """Save one; False, and said in log and status, if that fails. The run goes on, the next try comes by itself."""
        context, directory = self._context, self._directory
        try:
            path = await save_checkpoint(self._bus, context.agreed.spec, directory, context.clock, context.offload)
        except (UsageError, PeerError, OSError) as error:  # not all fragments are there yet, or the disk is full
            self._log.error("checkpoint_failed", error=str(error), safe="all committed versions, on the bus")
            if not isinstance(error, UsageError):
                self.problem = f"the last checkpoint could not be saved in {directory}, and is tried again: {error}"
            return False
        self.problem = ""
        self._log.info("checkpoint_saved", path=str(path))
        return True
