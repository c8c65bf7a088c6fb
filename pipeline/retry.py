"""Retries with exponential backoff."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Never, TypeVar

from diloco.pipeline.errors import BusError, BusUnavailable, PeerError, SpecMismatch, outage_event
from diloco.pipeline.waiting import TICK_S

T = TypeVar("T")
Errors = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff: each wait is twice the one before, up to `max_s`."""

    first_s: float
    max_s: float

    def waits(self) -> "Waits":
        """Return the waits from the first one on."""
        return Waits(self)


class Waits(Iterator[float]):
    """An endless iterator of waits in seconds."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff, self._next_s = backoff, backoff.first_s

    def __next__(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._backoff.max_s)
        return wait_s

    def after(self, lasted_s: float) -> float:
        """Return the next wait. After a try that ran longer than the longest wait, the backoff starts again."""
        if lasted_s > self._backoff.max_s:
            self._next_s = self._backoff.first_s
        return next(self)


class Retries:
    """Backoff for several fragments, independently of each other. The caller passes in the time."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._again: dict[int, tuple[float, Iterator[float]]] = {}
        """By failed fragment: when it may be tried again, and the waits after that."""

    def choose(self, wanted: Iterable[int], now: float) -> tuple[int | None, float | None]:
        """Return (a fragment to try now, None), or (None, seconds until one may be tried; None: none is wanted)."""
        due = {p: self._again[p][0] if p in self._again else now for p in wanted}
        if ready := [p for p, at in due.items() if at <= now]:
            return min(ready), None
        return None, max(TICK_S, min(due.values()) - now) if due else None

    def tried(self, p: int, done: bool, now: float) -> None:
        """Record that a try of fragment `p` ended; if it was not successful, the fragment's next wait begins."""
        _, waits = self._again.pop(p, (now, self._backoff.waits()))
        if not done:
            self._again[p] = now + next(waits), waits


async def retry(
    call: Callable[[], Awaitable[T]],
    waits: Waits,
    errors: Errors,
    failed: Callable[[BaseException, float], None],
    unless: Errors = (),
) -> T:
    """Call until it returns.

    Args:
        call: the call.
        waits: the backoff.
        errors: errors after which the call is repeated.
        failed: called with the error and the wait before the next try, in seconds.
        unless: subset of `errors` that is raised instead.
    """
    loop = asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        try:
            return await call()
        except unless:
            raise
        except errors as error:
            wait_s = waits.after(loop.time() - began_s)
            failed(error, wait_s)
            await asyncio.sleep(wait_s)


class Outages:
    """Repeats one party's calls of the bus until they succeed, and logs and counts the failed ones."""

    def __init__(self, log: Any, backoff: Backoff) -> None:
        self._log, self._backoff = log, backoff
        self.count = 0
        """Calls that found the bus unavailable, since joining."""
        self.gap = False
        """An outage interrupted work, so messages may have been missed. The task that reads everything again resets it.
        """

    async def retry(self, call: Callable[..., Awaitable[Any]], *args: Any, unless: Errors = ()) -> Any:
        """Call until the bus answers.

        Raises:
            unless: these errors are raised, not retried.
        """
        return await retry(lambda: call(*args), self._backoff.waits(), BusError, self._failed, unless)

    async def forever(self, work: Callable[[], Awaitable[None]]) -> Never:
        """Run `work`, which ends only by an error, and restart it whenever the bus or a peer interrupts it.

        Raises:
            SpecMismatch: the bus now holds another run.
        """

        def failed(error: BaseException, wait_s: float) -> None:
            self.gap |= isinstance(error, BusUnavailable)
            self._failed(error, wait_s, task=work.__name__)

        waits = self._backoff.waits()
        while True:
            await retry(work, waits, (BusError, PeerError), failed, SpecMismatch)

    def log_error(self, error: BaseException, **where: Any) -> None:
        """Log an error. Called directly where something other than `retry` repeats the work."""
        self._log.warning(outage_event(error), error=str(error), **where)

    def _failed(self, error: BaseException, wait_s: float, **where: str) -> None:
        self.count += isinstance(error, BusUnavailable)
        self.log_error(error, retry_s=wait_s, **where)
