"""What one thread asks of another one's event loop, and what becomes of it where that has failed."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_S = 0.2


def ask(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> Future[T]:
    """Have a loop do something; the answer is cancelled at once if the loop is closed."""
    try:
        return asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:
        work.close()
        nothing: Future[T] = Future()
        nothing.cancel()
        return nothing


def result_of(asked: Future[T], thread: threading.Thread) -> T:
    """Wait for the answer of a loop that runs in a thread.

    Raises:
        CancelledError: the thread has ended before.
    """
    while not wait({asked}, LOOK_S).done:
        if not thread.is_alive() and not asked.done():  # what a loop had been asked as it closed is never answered
            raise CancelledError
    return asked.result()
