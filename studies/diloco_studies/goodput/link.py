"""A learner's link to the syncers: constant, or a trace of bandwidth, latency and outages. Pure."""

import math
from bisect import bisect_right
from pathlib import Path

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.traces import read_trace


class Link:
    """Transfers take what the bandwidth of their time gives; a message waits for the end of an outage."""

    def __init__(self, at_s: list[float], rates: list[float], latencies_s: list[float]) -> None:
        """A trace: rate (bits/s) and latency from each time on until the next; it repeats from its last line on.

        With one line they hold for ever.
        """
        self._at_s, self._rates, self._latencies_s = at_s, rates, latencies_s
        self._period_s = at_s[-1] if len(at_s) > 1 else math.inf

    def _place(self, now_s: float) -> tuple[int, float]:
        """Line that holds, and when it ends."""
        if self._period_s == math.inf:
            return 0, math.inf
        rounds, inside = divmod(now_s, self._period_s)
        line = bisect_right(self._at_s, inside) - 1
        end_s = rounds * self._period_s + self._at_s[line + 1]
        return line, math.nextafter(end_s, math.inf) if end_s <= now_s else end_s

    def arrives_s(self, now_s: float) -> float:
        """When a control message that is sent now arrives."""
        line, end_s = self._place(now_s)
        while self._rates[line] == 0:
            now_s = end_s
            line, end_s = self._place(now_s)
        return now_s + self._latencies_s[line]

    def ends_s(self, now_s: float, bits: float) -> float:
        """When a transfer that begins now ends."""
        line, end_s = self._place(now_s)
        while bits > self._rates[line] * (end_s - now_s):
            bits -= self._rates[line] * (end_s - now_s)
            now_s = end_s
            line, end_s = self._place(now_s)
        return now_s + bits / self._rates[line] if bits > 0 else now_s


def link_of(constants: Constants) -> Link:
    """The link that the constants describe."""
    if constants.link_trace is None:
        return Link([0.0], [constants.link], [constants.latency])
    return _read(constants.link_trace)


def _read(path: Path) -> Link:
    rows = read_trace(path, 3)
    if len(rows) < 2 or rows[0, 0] != 0 or not (np.diff(rows[:, 0]) > 0).all():
        raise UsageError(
            f"{path}: a trace must have at least two lines of `second bits_per_second latency_s`, in order, starting "
            "at second 0"
        )
    if not (rows[:-1, 1] > 0).any():
        raise UsageError(f"{path}: a trace must have bandwidth above 0 at some time")
    return Link(*(rows[:, column].tolist() for column in range(3)))
