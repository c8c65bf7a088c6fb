"""When what has failed is tried again: after waits that double, each fragment for itself. Pure."""

from collections.abc import Iterable

LEAST_S = 1e-3
"""A finer wait could end a rounding error early, for ever."""


class Retries:
    """The waits of several fragments."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._again: dict[int, tuple[float, float]] = {}
        """When one that failed is tried again, and the wait after that."""

    def choose(self, wanted: Iterable[int], now: float) -> tuple[int | None, float | None]:
        """The first fragment that may be tried now; else None, and the seconds until one may (None: none is wanted)."""
        due = {p: self._again[p][0] if p in self._again else now for p in wanted}
        if ready := [p for p, at in due.items() if at <= now]:
            return min(ready), None
        return None, max(LEAST_S, min(due.values()) - now) if due else None

    def tried(self, p: int, done: bool, now: float) -> None:
        """A try ended."""
        wait_s = self._again.pop(p, (0.0, self._first_s))[1]
        if not done:
            self._again[p] = now + wait_s, min(2 * wait_s, self._most_s)
