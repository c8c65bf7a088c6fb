"""Measure how long a learner's steps take, and what share of that time the learner's own calls take. Pure: the caller
reads the clock.

The training thread writes, the exchange thread reads.
"""

from collections import deque
from statistics import median
from typing import Any

from diloco.pipeline.ema import Ema
from diloco.pipeline.view.merged_share import RECENT_S, SAMPLE_S

# The median is taken over this many step times.
STEPS_KEPT = 4096
# Time between two computations of the median: its sorting takes longer than all the rest of a report.
MEDIAN_S = 1.0
# Weight of the previous value in the moving averages of a learner's times.
DECAY = 0.9


class StepTimes:
    """The step times of one incarnation, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=STEPS_KEPT)
        self._median = 0.0, -MEDIAN_S  # of step times, and when it was taken
        self._step_s = Ema(DECAY)
        # Weighted sum of the steps' tokens per second, and the sum of the weights; each weighs `DECAY` of the next one.
        self._rates = 0.0, 0.0
        self._steps = 0
        self.blocked_s = 0.0  # time inside the library's own calls, without the cost of its other thread
        self._joins: float | None = None
        self._began = self._returned = 0.0
        # (wall_s, blocked_s) at moments of the last minutes, and at the last one before them.
        self._marks = deque([(0.0, 0.0)])

    def joining_begins(self, now: float) -> None:
        """Note when the learner begins to join."""
        self._joins = now

    def training_begins(self, now: float) -> None:
        """Start the clock: all before this was joining."""
        self._began = self._returned = now

    def entered(self, now: float) -> None:
        """Note that a step of the user's code is done."""
        took = now - self._returned
        self._step_s.observe(took)
        self._times.append(took)

    def returned(self, entered: float, now: float, tokens: int) -> None:
        """Note that the library's work after the step is done."""
        self._steps += 1
        # The first step is dropped from the rate: it warms caches and compiles.
        rates, weights = (0.0, 0.0) if self._steps == 2 else self._rates
        self._rates = DECAY * rates + tokens / max(now - self._returned, 1e-9), DECAY * weights + 1
        self.blocked_s += now - entered
        self._returned = now

    def elapsed_s(self, now: float) -> float:
        """Seconds since training began; 0.0 before."""
        # The training thread may have begun after `now` was read.
        return max(0.0, now - self._began) if self._began else 0.0

    @property
    def step_s(self) -> float:
        """Recent time of a step of the user's code; 0.0 before the first."""
        return self._step_s.value or 0.0

    def reported(self, now: float, last: bool) -> dict[str, Any]:
        """Return the fields of a report; those of the last report are exact."""
        if last or not self._median[0] or now - self._median[1] >= MEDIAN_S:
            times = self._times.copy()  # atomic under the interpreter's lock: the training thread appends meanwhile
            self._median = median(times) if times else 0.0, now
        wall_s, blocked_s, marks = self.elapsed_s(now), self.blocked_s, self._marks
        if wall_s - marks[-1][0] >= SAMPLE_S:
            marks.append((wall_s, blocked_s))
        while len(marks) > 1 and wall_s - marks[1][0] >= RECENT_S:
            marks.popleft()
        rates, weights = self._rates  # one read of both, since the training thread replaces the pair meanwhile
        return {
            "tokens_per_s": rates / weights if weights else 0.0,
            "step_s": self.step_s,
            "step_s_median": self._median[0],
            "blocked_s": blocked_s,
            "wall_s": wall_s,
            "joining_s": 0.0 if self._joins is None else max(0.0, (self._began or now) - self._joins),
            "earlier": marks[0],
        }
