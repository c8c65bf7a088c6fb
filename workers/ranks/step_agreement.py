"""What the ranks of a learner tell each other at each step, so that all do the same at the same step. Pure.

Each step every rank puts a few whole numbers into a sum over all ranks, which goes on beside the training. At the end
of the next step all have read it, alike. Adoptions are decided: rank 0 puts them in, all adopt when they have read it.
Snapshots are not: rank 0's exchange tells all ranks beside the training what is wanted, and whoever has heard it takes
one at its next step, and says so in that step's sum. Once all ranks have taken one at the same step, it counts; the
others are thrown away, and taken again a step later. So a snapshot is of the step that was under way as it was wanted.

A sum with snapshots is read as soon as it is there, in the exchange thread: it has the tokens of that very step.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

PARTS = 2**40
"""Of the run's progress, as a whole number."""
_HEAD = 4


@dataclass(frozen=True, slots=True)
class Decided:
    """What all ranks are to do at one step."""

    over: bool = False
    """The run is over."""
    progress: float = 0.0
    """Of the run, 0..1."""
    adoptions: Mapping[int, int] = field(default_factory=dict)
    """Fragment -> number of the pulled global, from 1."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """A sum as it is read."""

    tokens: int
    """Trained in its step by all ranks."""
    stop: bool
    """A rank was asked to end."""
    snapshots: frozenset[int]
    """Fragments of which all ranks have taken one at its end."""
    decided: Decided


class Sum(Protocol):
    """Of what all ranks put in at one step; under way. Of any thread."""

    @property
    def there(self) -> bool:
        """Whether nobody would wait for it."""

    def wait(self, within_s: float | None = None) -> list[int]:
        """It.

        Raises:
            RankGone: it will never be there, or is not in this time.
        """


class Meets(Protocol):
    """By what the ranks of a learner add up numbers."""

    @property
    def rank(self) -> int:
        """This one's number."""

    def start_sum(self, numbers: Sequence[int]) -> Sum:
        """Begin one with this rank's numbers; all ranks begin theirs in the same order."""

    def hand_round(self, source: int, elements: int, make: Callable[[], Any]) -> Any:
        """What rank `source` makes (elements,), on all ranks, which call this together."""


def numbers(
    tokens: int, stop: bool, fragments: int, taken: Collection[int] = (), decided: Decided = Decided()
) -> list[int]:
    """What a rank puts in.

    Args:
        tokens: that it has trained in this step.
        stop: it was asked to end.
        fragments: of the layout.
        taken: those that it has snapshot at its end.
        decided: rank 0's; the others decide nothing.
    """
    told = [tokens, int(stop), int(decided.over), int(PARTS * decided.progress)]
    told += [int(p in taken) for p in range(fragments)]
    return told + [decided.adoptions.get(p, 0) for p in range(fragments)]


def read(sums: Sequence[int], ranks: int) -> Agreed:
    """The sum of what all ranks have put in."""
    tokens, stop, over, parts = sums[:_HEAD]
    fragments = (len(sums) - _HEAD) // 2
    snapshots = frozenset(p for p in range(fragments) if sums[_HEAD + p] == ranks)
    adoptions = {p: number for p in range(fragments) if (number := sums[_HEAD + fragments + p])}
    return Agreed(tokens, stop > 0, snapshots, Decided(over > 0, parts / PARTS, adoptions))
