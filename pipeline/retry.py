"""What has failed is tried again, after waits that double up to a longest one."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Never, TypeVar

from diloco.pipeline.errors import BusError, BusUnavailable, PeerError, SpecMismatch, outage_event

T = TypeVar("T")
Errors = type[BaseException] | tuple[type[BaseException], ...]

LEAST_S = 1e-3
"""A finer wait could end a rounding error early, for ever."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between tries that fail one after the other: each twice the one before, and none above `most_s`."""

    first_s: float
    most_s: float

    def waits(self) -> "Waits":
        """From the first one on."""
        return Waits(self)


class Waits(Iterator[float]):
    """Endless, in seconds."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff, self._next_s = backoff, backoff.first_s

    def __next__(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._backoff.most_s)
        return wait_s

    def after(self, lasted_s: float) -> float:
        """The next one; after a try that had gone well for longer than any wait, the first."""
        if lasted_s > self._backoff.most_s:
            self._next_s = self._backoff.first_s
        return next(self)


class Retries:
    """The waits of several fragments, each for itself. Whoever tries them keeps the time."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._again: dict[int, tuple[float, Iterator[float]]] = {}
        """When one that failed is tried again, and the waits after that."""

    def choose(self, wanted: Iterable[int], now: float) -> tuple[int | None, float | None]:
        """The first fragment that may be tried now; else None, and the seconds until one may (None: none is wanted)."""
        due = {p: self._again[p][0] if p in self._again else now for p in wanted}
        if ready := [p for p, at in due.items() if at <= now]:
            return min(ready), None
        return None, max(LEAST_S, min(due.values()) - now) if due else None

    def tried(self, p: int, done: bool, now: float) -> None:
        """A try ended."""
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

    failed: told the error and the wait before the next try, s. unless: those of `errors` that are raised.
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
    """What one party asks of the bus is asked again until it answers; failed calls are logged and counted."""

    BACKOFF = Backoff(0.1, 2.0)

    def __init__(self, log: Any) -> None:
        self._log = log
        self.count = 0
        """Calls that found no bus, since joining."""
        self.gap = False
        """Work was broken off by one: what was told meanwhile is not known. Reset by whoever reads all anew."""

    async def retry(self, call: Callable[..., Awaitable[Any]], *args: Any, unless: Errors = ()) -> Any:
        """Call until the bus answers.

        Raises:
            unless: these are not for trying again.
        """
        return await retry(lambda: call(*args), self.BACKOFF.waits(), BusError, self._failed, unless)

    async def forever(self, work: Callable[[], Awaitable[None]]) -> Never:
        """Do a work of which there is always more; begin it again whenever the bus or a peer breaks it off.

        Raises:
            SpecMismatch: the run is another one by now.
        """

        def failed(error: BaseException, wait_s: float) -> None:
            self.gap |= isinstance(error, BusUnavailable)
            self._failed(error, wait_s, task=work.__name__)

        waits = self.BACKOFF.waits()
        while True:
            await retry(work, waits, (BusError, PeerError), failed, SpecMismatch)

    def told(self, error: BaseException, **where: Any) -> None:
        """Log an error, by itself where it is tried again by another way than `retry`."""
        self._log.warning(outage_event(error), error=str(error), **where)

    def _failed(self, error: BaseException, wait_s: float, **where: str) -> None:
        self.count += isinstance(error, BusUnavailable)
        self.told(error, retry_s=wait_s, **where)
