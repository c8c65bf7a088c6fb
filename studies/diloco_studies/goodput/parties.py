"""Learners as the syncer sees them in virtual time: step boundaries, what they publish, what they report. Pure."""

import math
from bisect import bisect_left, bisect_right
from typing import Any, TypeVar

import numpy as np

from diloco.pipeline.messages.fragment import DeltaHeader
from diloco.pipeline.messages.run import LearnerReport, SeenReport
from diloco.pipeline.messages.wire import Message
from diloco_studies.goodput.job import Timeline
from diloco_studies.goodput.traces import Floats

LAYOUT = b"simulated layout"
CODEC = "bf16"
TOKENS = 1
"""Tokens of an inner step: only ratios matter."""

M = TypeVar("M", bound=Message)


def bare(kind: type[M], **fields: Any) -> M:
    """A message with the fields that decisions look at; it never travels, so nothing is checked."""
    return kind.model_construct(**fields)  # type: ignore[return-value]  # it says Message


def digest_of(version: int) -> bytes:
    """Of a global fragment that has no values."""
    return version.to_bytes(16, "big", signed=True)


class StepClock:
    """One learner's step boundaries in wall time."""

    def __init__(self, timeline: Timeline, step_s: float, jitter: float, rng: np.random.Generator) -> None:
        """`jitter`: each step is up to this share longer than `step_s`."""
        stops = timeline.stops
        self._began, self._ended = stops.began_s.tolist(), stops.ended_s.tolist()
        lengths = stops.ended_s - stops.began_s
        before = np.concatenate([[0.0], np.cumsum(lengths)])
        self._stopped = before.tolist()
        """Length of the stops before each, and of all."""
        self._trained = (stops.began_s - before[:-1]).tolist()
        """Training time until each stop."""
        self._step_s = step_s
        self._ends: Floats | None = None
        if jitter:
            count = int(timeline.total_s / step_s) + 2
            self._ends = np.cumsum(step_s * (1.0 + jitter * rng.random(count)))
        self.mean_step_s = step_s * (1.0 + jitter / 2)
        self.waited_s = 0.0
        """Training time given to waiting for merges."""

    def trained_s(self, wall_s: float) -> float:
        """Time that was there to train in, waiting included."""
        stop = bisect_right(self._began, wall_s)
        if stop and wall_s < self._ended[stop - 1]:
            return float(self._trained[stop - 1])
        return float(wall_s - self._stopped[stop])

    def silent_s(self, wall_s: float) -> float:
        """For how long it has been paused; 0 if it is not."""
        stop = bisect_right(self._began, wall_s)
        return float(wall_s - self._began[stop - 1]) if stop and wall_s < self._ended[stop - 1] else 0.0

    def next_stop_s(self, wall_s: float) -> float:
        """When it is paused next; infinite if it is not any more."""
        stop = bisect_right(self._began, wall_s)
        return float(self._began[stop]) if stop < len(self._began) else math.inf

    def step_at(self, wall_s: float) -> int:
        """Inner steps done by then."""
        own_s = self.trained_s(wall_s) - self.waited_s + 1e-6
        return int(own_s / self._step_s) if self._ends is None else int(np.searchsorted(self._ends, own_s, "right"))

    def wall_s(self, step: int) -> float:
        """When it has done so many inner steps; infinite beyond what is known."""
        if self._ends is None:
            own_s = step * self._step_s
        elif step > self._ends.size:
            return math.inf
        else:
            own_s = float(self._ends[step - 1]) if step else 0.0
        trained_s = own_s + self.waited_s
        return trained_s + float(self._stopped[bisect_left(self._trained, trained_s)])


class Party:
    """A learner as the protocol sees it."""

    def __init__(self, number: int, clock: StepClock) -> None:
        self.name, self.clock = f"learner-{number}", clock
        self.version = 0
        self.adopted_step = 0
        self.published_step: int | None = None
        self.published_attempt = -1
        self.window_attempt = 0
        """The window's attempt when it last published into it."""
        self.serial = self.uploaded_serial = 0
        """Of its last delta, and of the last one of which all is on the bus."""
        self.waits_since: float | None = None
        self.waits: list[tuple[float, float]] = []
        self.pull_s = 0.0
        """How long its last pull took; a learner smooths those of a round's P fragments, which are alike."""
        self._fresh: SeenReport | None = None
        self._fresh_until = -math.inf

    def seen(self, now: float) -> SeenReport:
        """Its last word about itself, which ages while it is paused."""
        if self._fresh is None or self._fresh.report.versions[0] != self.version:
            report = bare(
                LearnerReport,
                learner=self.name,
                incarnation=self.name,
                versions=(self.version,),
                step_s=self.clock.mean_step_s,
                pull_s=self.pull_s,
                left=False,
            )
            self._fresh = bare(SeenReport, report=report, age_s=0.0)
        if now < self._fresh_until:
            return self._fresh
        if silent_s := self.clock.silent_s(now):
            return bare(SeenReport, report=self._fresh.report, age_s=silent_s)
        self._fresh_until = self.clock.next_stop_s(now)
        return self._fresh

    def publish(self, step: int, attempt: int, due: bool) -> DeltaHeader:
        """The header of a delta that it publishes at the end of an inner step."""
        self.published_attempt, self.published_step = attempt, step
        self.serial += 1
        return bare(
            DeltaHeader,
            learner=self.name,
            incarnation=self.name,
            fragment=0,
            base_version=self.version,
            base_digest=digest_of(self.version),
            attempt=attempt,
            serial=self.serial,
            steps=step - self.adopted_step,
            tokens=(step - self.adopted_step) * TOKENS,
            due=due,
            codec=CODEC,
            chunks=1,
            layout=LAYOUT,
            step_s=self.clock.mean_step_s,
            pull_s=self.pull_s,
        )
