"""A disk that may hang, as one behind a network does: nobody waits for it longer than a limit. asyncio."""

import asyncio
from collections.abc import Callable
from typing import Any

from diloco.pipeline.transfer.payloads import Offload

DISK_S = 60.0
"""Less than staged payloads live: a commit that has waited so long for its recording still finds its own."""


class Disk:
    """What one writer does there, one piece after the other: where it hangs, one thread does, whoever else writes."""

    def __init__(self, offload: Offload) -> None:
        """offload: runs blocking work."""
        self._offload, self._turn = offload, asyncio.Lock()
        self._late = False
        """Somebody has given up what has its turn, or had waited for that."""

    async def do(self, work: Callable[..., object], *args: Any) -> None:
        """Do it in its turn. What was given up goes on, if it had begun; until it ends all else is refused at once.

        Raises:
            TimeoutError: it is not done after `DISK_S`; an OSError, as what `work` raises.
        """
        if self._late and self._turn.locked():
            raise TimeoutError("the disk still does not answer")
        try:
            async with asyncio.timeout(DISK_S):
                await self._turn.acquire()
                self._late = False
                doing = asyncio.ensure_future(self._offload(work, *args))
                doing.add_done_callback(self._ended)
                await asyncio.wait([doing])
        except TimeoutError:
            self._late = True
            raise TimeoutError(f"the disk does not answer, or not within {DISK_S:g} s") from None
        doing.result()

    def _ended(self, doing: asyncio.Future[Any]) -> None:
        self._turn.release()
        if not doing.cancelled():
            doing.exception()  # of what was given up nobody asks for it
