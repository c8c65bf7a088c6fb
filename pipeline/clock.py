"""The real clock: the running event loop's time, which a virtual-time loop replaces as a whole."""

import asyncio
import time


class LoopClock:
    """`Clock` of the event loop that runs the caller."""

    def now(self) -> float:
        """Monotonic seconds."""
        return asyncio.get_running_loop().time()

    def unix(self) -> float:
        """Wall-clock seconds."""
        return time.time()
