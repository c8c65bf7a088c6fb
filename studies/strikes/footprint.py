"""What the processes of a struck run take: memory, descriptors and threads, and whether that grows. Pure.

A process that lives for `JUDGED_S` has begun all that it goes on with. What it takes in the last fifth of its life is
held against the second fifth.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

JUDGED_S = 600.0
MORE = {"MB": 16.0, "descriptors": 8.0, "threads": 8.0}
"""What may come and go: connections in flight, threads that help, memory that an allocator keeps."""
MORE_SHARE = 0.05
"""And so much of what was there."""

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

    def early_and_late(self, what: str) -> tuple[float, float]:
        """Medians in the second fifth of its life, and in the last."""
        took = [sample[what] for _, sample in self.samples]
        fifth = max(1, len(took) // 5)
        return median(took[fifth : 2 * fifth] or took), median(took[-fifth:])


def grown(lives: Iterable[Life]) -> list[str]:
    """Which of them took more and more."""
    found = []
    for life in lives:
        for what, more in MORE.items():
            early, late = life.early_and_late(what)
            if late > early * (1 + MORE_SHARE) + more:
                found.append(f"{life.name} went from {early:.0f} to {late:.0f} {what} in {life.length_s:.0f} s")
    return found


def rows(lives: Iterable[Life]) -> list[dict[str, float | str]]:
    """What each took early and late, for the report."""
    found: list[dict[str, float | str]] = []
    for life in lives:
        row: dict[str, float | str] = {"name": life.name, "length_s": life.length_s}
        for what in MORE:
            row[f"early {what}"], row[f"late {what}"] = life.early_and_late(what)
        found.append(row)
    return found


def lines(found: Sequence[Mapping[str, float | str]]) -> list[str]:
    """The same as a table for people."""
    if not found:
        return []
    return [
        "## Processes",
        "",
        f"Of {JUDGED_S / 60:g} minutes and more: what they took in the second fifth of their life, and in the last.",
        "",
        f"| process | lived | {' | '.join(MORE)} |",
        f"|---|---|{'---|' * len(MORE)}",
        *(
            f"| {one['name']} | {one['length_s']:.0f} s | "
            + " | ".join(f"{one[f'early {what}']:.0f}, {one[f'late {what}']:.0f}" for what in MORE)
            + " |"
            for one in found
        ),
        "",
    ]
