"""An asyncio event loop whose clock jumps: a sleep of an hour takes no time, and order is deterministic.

When no callback is ready, time moves to the next timer at once. Nothing real (sockets, threads) may be
awaited on it; a loop with nothing ready and no timer is a deadlock and raises.
"""

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, ParamSpec, TypeVar, TypeVarTuple, Unpack

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

UNIX_START_S = 1_700_000_000.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Use through `run_virtual`. Timers due at the same time fire in the order in which they were set.

    It has timers and a round (`_run_once`) of its own, which ask no selector: worlds are cheaper by that.
    """

    _ready: "deque[asyncio.Handle]"
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.virtual_now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_set = 0

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self.virtual_now

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's."""
        return self.call_at(self.virtual_now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_set += 1
        heappush(self._timers, (when, self._timers_set, timer))
        return timer

    def _run_once(self) -> None:
        """One round: what is ready; if nothing is, time jumps to the next timer, and then those that are due."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise RuntimeError("deadlock in virtual time: nothing is ready and nothing is scheduled")
            self.virtual_now = max(self.virtual_now, timers[0][0])
        while timers and timers[0][0] <= self.virtual_now:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()


class VirtualClock:
    """`pipeline.bus.ports.Clock` of a virtual loop; `skew_s`: how far this machine's wall clock is ahead."""

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


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine, run to its end in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


async def inline(work: Callable[..., Any], *args: Any) -> Any:
    """`offload` of a party in virtual time: work takes none, and no thread."""
    return work(*args)
