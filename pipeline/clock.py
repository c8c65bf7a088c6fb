"""The real event loop and its clock, which a virtual-time loop replaces as a whole."""

import asyncio
import time


def fast_loop() -> asyncio.AbstractEventLoop:
    """uvloop's event loop where it is installed (several times faster on large socket writes), else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopClock:
    """`Clock` of the event loop that runs the caller."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        """ahead_s: how far the wall clock that is told is ahead of this machine's."""
        self._ahead_s = ahead_s

    def now(self) -> float:
        """Monotonic seconds."""
        return asyncio.get_running_loop().time()

    def unix(self) -> float:
        """Wall-clock seconds."""
        return time.time() + self._ahead_s
