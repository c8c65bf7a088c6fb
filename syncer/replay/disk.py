"""Writing to a disk that may hang, such as a network file system, with a limit on every wait. Runs on asyncio."""

import asyncio
from collections.abc import Callable
from typing import Any

from diloco.pipeline.transfer.payloads import Offload
from diloco.syncer.times import TIMES


class Disk:
    """Does one writer's work on a disk, one piece after the other, so that a hanging disk blocks one thread only."""

    def __init__(self, offload: Offload) -> None:
        self._offload, self._turn = offload, asyncio.Lock()
        self._late = False
        """True if a caller has given up the work that has its turn, or its wait for that turn."""

    async def do(self, work: Callable[..., object], *args: Any) -> None:
        """Run `work` in its turn.

        Work that is given up after it has begun continues in its thread. Until it ends, other work is refused at once.

        Raises:
            TimeoutError: the work was not done within `disk_s` (a subclass of OSError).
            OSError: raised by `work`.
        """
        if self._late and self._turn.locked():
            raise TimeoutError("the disk is still not answering")
        try:
            async with asyncio.timeout(TIMES.disk_s):
                await self._turn.acquire()
                self._late = False
                doing = asyncio.ensure_future(self._offload(work, *args))
                doing.add_done_callback(self._ended)
                await asyncio.wait([doing])  # unlike `await doing`, this does not cancel it: `_ended` releases the turn
        except TimeoutError:
            self._late = True
            raise TimeoutError(f"the disk did not answer within {TIMES.disk_s:g} s") from None
        doing.result()

    def _ended(self, doing: asyncio.Future[Any]) -> None:
        self._turn.release()
        if not doing.cancelled():
            doing.exception()  # mark it as retrieved: nobody awaits work that was given up
