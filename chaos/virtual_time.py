"""An asyncio event loop whose clock jumps: a sleep of an hour takes no time, and order is deterministic.

When no callback is ready, time moves to the next timer at once. Nothing real (sockets, threads) may be
awaited on it; a loop with nothing ready and no timer is a deadlock and raises.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

UNIX_START_S = 1_700_000_000.0


class _JumpingSelector(selectors.DefaultSelector):
    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock in virtual time: nothing is ready and nothing is scheduled")
        self.loop.virtual_now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Use through `run_virtual`."""

    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self.virtual_now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self.virtual_now


class VirtualClock:
    """`pipeline.ports.Clock` of a virtual loop; `skew_s`: how far this machine's wall clock is ahead."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self._skew_s = skew_s

    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    def unix(self) -> float:
        """Its wall-clock time."""
        return UNIX_START_S + self._skew_s + asyncio.get_running_loop().time()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
