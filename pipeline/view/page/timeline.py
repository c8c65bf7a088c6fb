"""Events and numbers over time, in buckets of equal length and in bounded memory. Pure.

A lane has a byte per bucket, whose bits say what was the case at any time in it. A series has the last number of each
bucket, or None. The page has two timelines: a sliding one of the last minutes with short buckets, and one of the whole
run, whose buckets double in length whenever there are too many.
"""

import math
from base64 import b64encode
from typing import Any

MAX_BUCKETS = 1200


class Timeline:
    """Lanes and series. All times are Unix times; anything before the first kept bucket is dropped."""

    def __init__(self, begin_s: float, step_s: float, sliding: bool, max_buckets: int = MAX_BUCKETS) -> None:
        self.step_s, self._sliding, self._max_buckets = step_s, sliding, max_buckets
        self.first = math.floor(begin_s / step_s)
        """Number of the first bucket that is kept. Bucket n begins at n * `step_s`."""
        self.lanes: dict[str, bytearray] = {}
        self.series: dict[str, list[float | None]] = {}
        self._changed: dict[tuple[str, str], tuple[int, int]] = {}
        """(kind, name) -> numbers of the first and the last bucket that changed since the last patch."""
        self._rebuilt = True

    @property
    def begins_s(self) -> float:
        """When the first kept bucket begins."""
        return self.first * self.step_s

    # --- writing ------------------------------------------------------------------------------------------

    def mark(self, lane: str, begin_s: float, end_s: float, bits: int, clear: int = 0) -> None:
        """Set `bits` and clear `clear` in all buckets between two times, both included."""
        last = self._number(end_s)
        first = max(self._number(begin_s), self.first)
        if last < first:
            return
        cells = self.lanes.setdefault(lane, bytearray())
        missing = last - self.first + 1 - len(cells)
        cells.extend(bytes(max(0, missing)))
        bits, keep = int(bits), 0xFF & ~int(clear)  # plain ints: operations on enum flags are far slower
        for at in range(first - self.first, last - self.first + 1):
            cells[at] = cells[at] & keep | bits
        self._touch(("lanes", lane), first, last)

    def put(self, name: str, unix_s: float, value: float | None) -> None:
        """Set a series at one time; None and numbers that are not finite are ignored."""
        if value is None or not math.isfinite(value):
            return
        number = self._number(unix_s)
        if number < self.first:
            return
        values = self.series.setdefault(name, [])
        values.extend([None] * (number - self.first + 1 - len(values)))
        values[number - self.first] = value
        self._touch(("series", name), number, number)

    def reach(self, unix_s: float) -> None:
        """Add buckets up to a time, before earlier buckets are written."""
        self._number(unix_s)

    def _touch(self, key: tuple[str, str], first: int, last: int) -> None:
        before = self._changed.get(key, (first, last))
        self._changed[key] = min(before[0], first), max(before[1], last)

    def _number(self, unix_s: float) -> int:
        """Return the number of the bucket at a time, after adding buckets up to it."""
        while (number := math.floor(unix_s / self.step_s)) - self.first >= self._max_buckets:
            if self._sliding:
                self._slide(number - self.first - self._max_buckets + 1)
            else:
                self._double()
        return number

    def _slide(self, count: int) -> None:
        """Drop the oldest buckets, a few more than necessary, so that this is not needed at every step."""
        count += self._max_buckets // 20
        self.first += count
        for cells in self.lanes.values():
            del cells[:count]
        for values in self.series.values():
            del values[:count]

    def _double(self) -> None:
        """Combine each pair of buckets into one."""
        lead = self.first % 2  # 1: the first bucket is the second of its pair
        for lane, cells in self.lanes.items():
            padded = bytes(lead) + cells + bytes((lead + len(cells)) % 2)
            self.lanes[lane] = bytearray(a | b for a, b in zip(padded[::2], padded[1::2], strict=True))
        for name, values in self.series.items():
            even: list[float | None] = [*[None] * lead, *values, *[None] * ((lead + len(values)) % 2)]
            self.series[name] = [a if b is None else b for a, b in zip(even[::2], even[1::2], strict=True)]
        self.first //= 2
        self.step_s *= 2
        self._rebuilt = True

    # --- reading ------------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """Return everything, JSON-able, with lanes in base64."""
        return {
            "step_s": self.step_s,
            "first": self.first,
            "lanes": {lane: b64encode(cells).decode() for lane, cells in self.lanes.items()},
            "series": self.series,
        }

    def patch(self) -> dict[str, Any]:
        """Return the changes since the last patch, for each lane or series (first number, buckets); or everything.

        The receiver drops buckets before `first`.
        """
        changed, rebuilt = self._changed, self._rebuilt
        self._changed, self._rebuilt = {}, False
        if rebuilt:
            return {"whole": self.whole()}
        found: dict[str, Any] = {"first": self.first, "lanes": {}, "series": {}}
        for (kind, name), (first, last) in changed.items():
            first = max(first, self.first)
            if last >= first:
                cells = getattr(self, kind)[name][first - self.first : last - self.first + 1]
                found[kind][name] = [first, list(cells)]
        return found
