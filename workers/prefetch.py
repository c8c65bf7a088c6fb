"""Batches that are drawn and not yet trained on, and how many of them a step has trained. Pure.

A loader draws ahead of the loop: its workers have some batches, the loop may look at one before it trains it. All keep
the order. So what a step has trained is the oldest that is in hand. How many:

| in a pass                           | a step has trained                                                      |
|-------------------------------------|-------------------------------------------------------------------------|
| its first step                      | `accumulate` batches; what is left in hand then is what is drawn ahead  |
| until the loader has drawn the last | what is in hand beyond that: a loader draws one for each it hands out   |
| from then on                        | `accumulate`                                                            |

The middle row sees also what a loop has let go by without a step: under a GradScaler that skips, or a filter.
A pass that is given up gives back what is in hand: it is drawn again, in its order, before anything new.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from diloco.pipeline.errors import UsageError

WRONG_STEPS = 16
"""After so many steps in a row with one other number of batches, it was said wrongly."""


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a shard is trained on, once a batch is."""

    entry_id: str
    read: int
    """Blocks of it."""
    whole: bool


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch."""

    indices: tuple[int, ...]
    reached: tuple[Reached, ...]
    """Of the shards that it is from; none of what is read again."""


class Prefetched:
    """The batches of one learner."""

    def __init__(self, accumulate: int) -> None:
        """accumulate: batches in a step."""
        self._accumulate = accumulate
        self._drawn: deque[Drawn] = deque()
        self._again: deque[Drawn] = deque()
        """To be drawn again."""
        self._ahead: int | None = None
        """In hand behind the first step of the pass, once it is made."""
        self._ended = False
        """The last batch of the pass is drawn."""
        self._other, self._others = 0, 0
        """Another number of batches than was said, and how many steps in a row had it."""

    def begin(self) -> None:
        """A pass begins. If it is not the first, the one before is given up."""
        self._again.extendleft(reversed(self._drawn))
        self._drawn.clear()
        self._ahead, self._ended = None, False

    def draw(self, new: Callable[[], Drawn]) -> Drawn:
        """The next batch; `new` makes one that was never drawn."""
        self._drawn.append(self._again.popleft() if self._again else new())
        return self._drawn[-1]

    def end(self) -> None:
        """The loader has been told that the pass has no more batches."""
        self._ended = True

    def stepped(self) -> list[Drawn]:
        """What a step has trained, oldest first.

        Raises:
            UsageError: steps have another number of batches than was said.
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
                f"each of the last {WRONG_STEPS} steps has trained {count} batches, and not {self._accumulate}: say "
                f"batches(..., accumulate={count})"
            )
