"""Requests for copies of the moments: the exchange thread asks, the training thread answers.

This is the only moments' state that both threads change.
"""

import asyncio
from collections import deque

from diloco.workers.moments.optimizer_state import StateCopy


class CopyRequests:
    """The requests that are not answered yet."""

    def __init__(self) -> None:
        # No lock is needed: both threads use only single operations of the deque, which are atomic.
        self._asked: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[StateCopy | None]]] = deque()

    # --- the exchange thread ----------------------------------------------------------------------------

    async def ask(self) -> StateCopy | None:
        """Return a copy, once the training thread has made it; None: it cannot make one."""
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[StateCopy | None] = loop.create_future()
        self._asked.append((loop, asked))
        return await asked

    # --- the training thread ----------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._asked)

    def answer(self, copy: StateCopy | None) -> None:
        """Answer all requests with this copy; None: there is none to give."""
        while self._asked:
            loop, asked = self._asked.popleft()
            loop.call_soon_threadsafe(_answer, asked, copy)


def _answer(asked: "asyncio.Future[StateCopy | None]", copy: StateCopy | None) -> None:
    if not asked.done():  # the request may have been cancelled meanwhile
        asked.set_result(copy)
