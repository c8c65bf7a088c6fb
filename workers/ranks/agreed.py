"""What the ranks of a learner tell each other at each step, so that all do the same at the same step. Pure.

Each step every rank puts a few whole numbers into a sum over all ranks, which goes on beside the training. `LAG` steps
later it is read, on all ranks alike. What it says is done then: fragments are adopted and snapshot, the loop ends.

| step | |
|---|---|
| t | rank 0 decides, and puts it into the sum of step t, with the tokens that it has trained in it |
| t + LAG | all ranks read that sum, and do it |
| t + 2 LAG | rank 0 reads the tokens of step t + LAG: it knows what the snapshots of that step have trained |

So rank 0 counts (`Rounds`) in the order of the steps, `LAG` of them behind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

LAG = 2
"""Steps until a sum is read. The ranks train in step: all have put in theirs before any is through with the next one's
gradients. So after two it is there, and nobody waits."""
AHEAD = 2 * LAG + 1
"""Steps between what rank 0 has counted as it decides, and the doing of it: it decides at a step's end, before it reads
another sum."""
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
    snapshots: frozenset[int] = frozenset()
    """Fragments."""
    adoptions: Mapping[int, int] = field(default_factory=dict)
    """Fragment -> number of the pulled global, from 1."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """A sum as it is read."""

    tokens: int
    """Trained in its step by all ranks."""
    stop: bool
    """A rank was asked to end."""
    decided: Decided


class Sum(Protocol):
    """Of what all ranks put in at one step; under way."""

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


def numbers(tokens: int, stop: bool, fragments: int, decided: Decided = Decided()) -> list[int]:
    """What a rank puts in.

    Args:
        tokens: that it has trained in this step.
        stop: it was asked to end.
        fragments: of the layout.
        decided: rank 0's; the others decide nothing.
    """
    told = [tokens, int(stop), int(decided.over), int(PARTS * decided.progress)]
    told += [int(p in decided.snapshots) for p in range(fragments)]
    return told + [decided.adoptions.get(p, 0) for p in range(fragments)]


def read(sums: Sequence[int]) -> Agreed:
    """The sum of what all ranks have put in."""
    tokens, stop, over, parts = sums[:_HEAD]
    fragments = (len(sums) - _HEAD) // 2
    snapshots = frozenset(p for p in range(fragments) if sums[_HEAD + p])
    adoptions = {p: number for p in range(fragments) if (number := sums[_HEAD + fragments + p])}
    return Agreed(tokens, stop > 0, Decided(over > 0, parts / PARTS, snapshots, adoptions))
