"""The integers that a learner's ranks sum at each step, so that all do the same thing at the same step. Pure.

docs/explanation/ranks.md ("The same step") says what is summed, and how adoptions and snapshots are agreed. A sum that
reports snapshots is read in the exchange thread as soon as it is complete: it also holds the number of tokens of that
very step.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

# The run's progress in 0..1 travels in an integer sum, so it is scaled by this factor.
PARTS = 2**40
_HEAD = 4


@dataclass(frozen=True, slots=True)
class Decisions:
    """Rank 0's decisions for one step."""

    over: bool = False
    """True once the run is over."""
    progress: float = 0.0
    """Progress of the run, 0..1."""
    adoptions: Mapping[int, int] = field(default_factory=dict)
    """Maps a fragment to the number of the pulled global that is adopted; numbers start at 1."""


@dataclass(frozen=True, slots=True)
class StepSum:
    """The decoded sum of one step."""

    tokens: int
    """Tokens that all ranks together trained in the step."""
    stop: bool
    """True if at least one rank was asked to end."""
    snapshots: frozenset[int]
    """Fragments of which every rank took a snapshot at the end of the step."""
    decided: Decisions


class Sum(Protocol):
    """An all-reduce in flight over the integers that the ranks contribute at one step. Any thread may use it."""

    @property
    def done(self) -> bool:
        """Return whether the sum is complete, so that `wait` would not block."""

    def wait(self, within_s: float | None = None) -> list[int]:
        """Wait for the sum and return it.

        Raises:
            RankGone: the sum will never be complete, or is not within `within_s` seconds.
        """


class DataPlace(NamedTuple):
    """Which of a learner's data a rank trains on."""

    number: int
    """Number of the rank's group: the ranks of one group train on the same data, since they divide layers (tensor
    parallelism). Otherwise each rank is a group."""
    groups: int
    first: int
    """The rank of the group whose tokens count, and with whose random states and data position all come back."""


class Collectives(Protocol):
    """The interface through which a learner's ranks sum integers."""

    @property
    def place(self) -> DataPlace:
        """The data that this rank trains on."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    def start_sum(self, numbers: Sequence[int]) -> Sum:
        """Start a sum with this rank's integers. All ranks start their sums in the same order."""

    def broadcast(self, source: int, elements: int, make: Callable[[], Any]) -> Any:
        """Return on all ranks the vector (elements,) that rank `source` makes. All ranks call this together."""


def encode(
    tokens: int, stop: bool, fragments: int, taken: Collection[int] = (), decided: Decisions = Decisions()
) -> list[int]:
    """Return the integers that this rank contributes to the sum.

    Args:
        tokens: tokens that this rank trained in this step.
        stop: this rank was asked to end.
        fragments: number of fragments in the layout.
        taken: fragments of which this rank took a snapshot at the end of this step.
        decided: rank 0's decisions; the other ranks leave the default, which adds nothing to the sum.
    """
    contributed = [tokens, int(stop), int(decided.over), int(PARTS * decided.progress)]
    contributed += [int(p in taken) for p in range(fragments)]
    return contributed + [decided.adoptions.get(p, 0) for p in range(fragments)]


def decode(sums: Sequence[int], ranks: int) -> StepSum:
    """Decode the sum of the integers of all ranks."""
    tokens, stop, over, parts = sums[:_HEAD]
    fragments = (len(sums) - _HEAD) // 2
    snapshots = frozenset(p for p in range(fragments) if sums[_HEAD + p] == ranks)
    # Only rank 0 contributes adoptions: the sum is its number.
    adoptions = {p: number for p in range(fragments) if (number := sums[_HEAD + fragments + p])}
    return StepSum(tokens, stop > 0, snapshots, Decisions(over > 0, parts / PARTS, adoptions))
