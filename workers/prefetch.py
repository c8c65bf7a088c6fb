"""Keep batches that are drawn and not yet trained on, and infer how many of them a step has trained. Pure.

A loader draws ahead of the loop: its workers hold some batches, and the loop may look at one before it trains on it.
All of them keep the order. So a step has trained the oldest batches that are held here. Their number:

| in a pass                           | a step has trained                                                      |
|-------------------------------------|-------------------------------------------------------------------------|
| its first step                      | `accumulate` batches; what is left then was drawn ahead                 |
| until the loader has drawn the last | what is held beyond that: a loader draws one for each that it hands out |
| from then on                        | `accumulate`                                                            |

The middle row also covers batches that a loop drops without a step: under a GradScaler that skips, or by a filter. When
a pass is given up, its batches here are drawn again, in their order, before anything new.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from diloco.pipeline.errors import UsageError

# After this many steps in a row with the same other number of batches, `accumulate` must be wrong.
WRONG_STEPS = 16


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """How far a shard is trained on, once a batch was trained."""

    entry_id: str
    read: int
    """Number of its blocks."""
    whole: bool


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch that was drawn."""

    indices: tuple[int, ...]
    reached: tuple[ShardProgress, ...]
    """How far it takes its shards; shards that are read again are not listed."""


class Prefetched:
    """The batches of one learner that are drawn and not trained on."""

    def __init__(self, accumulate: int) -> None:
        """accumulate: batches in a step."""
        self._accumulate = accumulate
        self._drawn: deque[Drawn] = deque()
        self._again: deque[Drawn] = deque()  # batches of a pass that was given up, to be drawn again
        self._ahead: int | None = None  # batches drawn ahead, as counted after the first step of the pass
        self._ended = False  # the last batch of the pass is drawn
        self._other, self._others = 0, 0  # a number other than `accumulate`, and how many steps in a row had it

    def begin(self) -> None:
        """Begin a pass. A previous one is given up, and its batches are drawn again."""
        self._again.extendleft(reversed(self._drawn))
        self._drawn.clear()
        self._ahead, self._ended = None, False

    def draw(self, new: Callable[[], Drawn]) -> Drawn:
        """Return the next batch; `new` makes one that was never drawn."""
        self._drawn.append(self._again.popleft() if self._again else new())
        return self._drawn[-1]

    def end(self) -> None:
        """Note that the loader was told that the pass has no more batches."""
        self._ended = True

    def stepped(self) -> list[Drawn]:
        """Return the batches that a step has trained, oldest first.

        Raises:
            UsageError: steps train another number of batches than `accumulate`.
        """
        if self._ahead is None or self._ended:
            count = min(self._accumulate, len(self._drawn))
        else:
            count = len(self._drawn) - self._ahead
            self._compare(count)
        trained = [self._drawn.popleft() for _ in range(count)]
        if self._ahead is None and trained:
            self._ahead = len(self._drawn)
        return trained

    def _compare(self, count: int) -> None:
        if count in (0, self._accumulate):
            self._others = 0
            return
        self._others = self._others + 1 if count == self._other else 1
        self._other = count
        if self._others == WRONG_STEPS:
            raise UsageError(
                f"each of the last {WRONG_STEPS} steps has trained {count} batches instead of {self._accumulate}: use "
                f"batches(..., accumulate={count})"
            )
