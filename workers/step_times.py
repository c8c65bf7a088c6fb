"""How long a learner's steps take, and how much of that its own calls. Pure: the caller reads the clock.

The training thread writes, the exchange's thread reads.
"""

from collections import deque
from statistics import median
from typing import Any

from diloco.pipeline.ema import Ema

STEPS_KEPT = 4096
"""Step times the median is taken over."""
MEDIAN_S = 1.0
"""It is taken anew so often: sorting takes longer than all else of a report."""
DECAY = 0.9
"""Of the averages of a learner's measured times."""


class StepTimes:
    """Of one incarnation, in seconds; times of a clock that only rises."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=STEPS_KEPT)
        self._median = 0.0, -MEDIAN_S
        """Of step times, and when it was taken."""
        self._step_s = Ema(DECAY)
        self._rates = 0.0, 0.0
        """Tokens per second of the steps, each weighing `DECAY` of the next, and the sum of these weights."""
        self._steps = 0
        self.blocked_s = 0.0
        """Time inside the library's own calls: not what its other thread costs beside it."""
        self._began = self._returned = 0.0

    def training_begins(self, now: float) -> None:
        """What came before was joining."""
        self._began = self._returned = now

    def entered(self, now: float) -> None:
        """A step of the user's is done."""
        took = now - self._returned
        self._step_s.observe(took)
        self._times.append(took)

    def returned(self, entered: float, now: float, tokens: int) -> None:
        """So is what the library does after it."""
        self._steps += 1
        rates, weights = (0.0, 0.0) if self._steps == 2 else self._rates  # the first one warms caches and compiles
        self._rates = DECAY * rates + tokens / max(now - self._returned, 1e-9), DECAY * weights + 1
        self.blocked_s += now - entered
        self._returned = now

    @property
    def step_s(self) -> float:
        """Of a step of the user's, lately; 0.0 before the first."""
        return self._step_s.value or 0.0

    def reported(self, now: float, last: bool) -> dict[str, Any]:
        """What a report says of it; the last one is exact."""
        if last or not self._median[0] or now - self._median[1] >= MEDIAN_S:
            times = self._times.copy()  # one step under the interpreter's lock: the training thread appends meanwhile
            self._median = median(times) if times else 0.0, now
        rates, weights = self._rates  # at one go: the training thread writes meanwhile
        return {
            "tokens_per_s": rates / weights if weights else 0.0,
            "step_s": self.step_s,
            "step_s_median": self._median[0],
            "blocked_s": self.blocked_s,
            # The training thread may have begun after `now` was read.
            "wall_s": max(0.0, now - self._began) if self._began else 0.0,
        }
