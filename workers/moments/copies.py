"""Copies of the moments for peers: the exchange thread asks, the training thread answers. The one thing both change."""

import asyncio
from collections import deque

from diloco.workers.moments.optimizer_state import StateCopy


class CopyRequests:
    """Those not yet answered."""

    def __init__(self) -> None:
        self._asked: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[StateCopy | None]]] = deque()
        """Its own operations are atomic."""

    # --- the exchange thread ----------------------------------------------------------------------------

    async def ask(self) -> StateCopy | None:
        """A copy, once the training thread has made it; None: it cannot make one."""
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[StateCopy | None] = loop.create_future()
        self._asked.append((loop, asked))
        return await asked

    # --- the training thread ----------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._asked)

    def answer(self, copy: StateCopy | None) -> None:
        """Give the copy to all that have asked; None: there is none to give."""
        while self._asked:
            loop, asked = self._asked.popleft()
            loop.call_soon_threadsafe(_answer, asked, copy)


def _answer(asked: "asyncio.Future[StateCopy | None]", copy: StateCopy | None) -> None:
    if not asked.done():  # who asked may have given up
        asked.set_result(copy)
