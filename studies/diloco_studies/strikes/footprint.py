"""What the processes of a struck run take: memory, descriptors and threads, and whether that grows. Pure.

A process that lives for `JUDGED_S` has begun all that it goes on with. What it takes in the last fifth of its life is
held against the second fifth. What servers hold is judged by their keys (`growth`), not here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

JUDGED_S = 600.0
MORE = {"MB": 16.0, "descriptors": 16.0, "threads": 8.0}
"""What may come and go: memory that an allocator keeps, connections of two lanes, threads that help."""
MORE_SHARE = 0.05
"""And so much of what was there."""

FIFTHS = 5

Sample = Mapping[str, float]
"""By `MORE`'s names."""


@dataclass(frozen=True, slots=True)
class Life:
    """A process from its first sample to its last."""

    name: str
    samples: Sequence[tuple[float, Sample]]
    """(time in s, what it took)"""

    @property
    def length_s(self) -> float:
        """Between first and last."""
        return self.samples[-1][0] - self.samples[0][0]

    def fifths(self, what: str) -> list[float]:
        """Medians in each fifth of its life."""
        took = [sample[what] for _, sample in self.samples]
        bounds = [round(len(took) * one / FIFTHS) for one in range(FIFTHS + 1)]
        return [median(took[first:last] or took[-1:]) for first, last in pairwise(bounds)]


def grown(lives: Iterable[Life]) -> list[str]:
    """Which of them took more and more; servers left out."""
    found = []
    for life in lives:
        if life.name.startswith(("redis", "sentinel")):
            continue
        for what, more in MORE.items():
            _, early, *_, late = life.fifths(what)
            if late > early * (1 + MORE_SHARE) + more:
                found.append(f"{life.name} went from {early:.0f} to {late:.0f} {what} in {life.length_s:.0f} s")
    return found


def rows(lives: Iterable[Life]) -> list[dict[str, Any]]:
    """What each took in the fifths of its life, for the report."""
    return [
        {"name": life.name, "length_s": life.length_s} | {what: life.fifths(what) for what in MORE} for life in lives
    ]


def lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same as a table for people."""
    if not found:
        return []
    return [
        "## Processes",
        "",
        f"Of {JUDGED_S / 60:g} minutes and more: what they took in each fifth of their life.",
        "",
        f"| process | lived | {' | '.join(MORE)} |",
        f"|---|---|{'---|' * len(MORE)}",
        *(
            f"| {one['name']} | {one['length_s']:.0f} s | "
            + " | ".join(", ".join(f"{took:.0f}" for took in one[what]) for what in MORE)
            + " |"
            for one in found
        ),
        "",
    ]
