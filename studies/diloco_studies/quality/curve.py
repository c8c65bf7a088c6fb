"""What a run leaves: a curve, and what it cost. The engines fill a `Recorder`; nothing here trains."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco_studies.quality.settings import PATIENCE, LabRun
from diloco_studies.quality.tasks.tasks import Task


class Stopped(Exception):
    """The run was asked to stop; nothing of it is kept."""


@dataclass(frozen=True, slots=True)
class Point:
    """The global parameters, measured."""

    tokens: int
    """Trained by all learners until then."""
    merged_tokens: float
    """Tokens that the parameters are made of, mean over the elements."""
    virtual_s: float
    train_loss: float
    """Mean over all steps since the last point, all learners."""
    measures: dict[str, float]


Progress = Callable[[float, float], bool]
"""(share of the budget done, last measure) -> go on."""


@dataclass(slots=True)
class Recorder:
    """Gathers what is measured of one run, and where its real time goes."""

    run: LabRun
    task: Task
    progress: Progress
    points: list[Point] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    """Virtual time in which learners computed."""
    compute_s: float = 0.0
    """Processor time in training steps."""
    evaluate_s: float = 0.0
    begun_tokens: int = 0
    """Of steps done or under way."""
    began: float = field(default_factory=time.perf_counter)
    first_step: float | None = None
    """Processor time when the first step began: what comes before is set-up."""
    _losses: list[Any] = field(default_factory=list)
    """Of steps since the last point; tensors, so that no step waits for its device."""

    @property
    def budget_tokens(self) -> int:
        """All that the run is to train."""
        return self.run.budget_examples * self.task.example_tokens

    @property
    def due(self) -> bool:
        """Whether a point of the curve is due."""
        return self.tokens < self.budget_tokens and self._marks(self.tokens) > len(self.points)

    def _marks(self, tokens: int) -> int:
        return tokens * self.run.evaluations // self.budget_tokens

    def give_up(self) -> UsageError:
        """What to raise after `LabRun.patience_s`."""
        return UsageError(
            f"gave up after {self.run.patience_s:.4g} virtual seconds, {PATIENCE} times what its steps take, at "
            f"{self.tokens / self.budget_tokens:.0%}: failures, waiting and calls to the bus leave no time for steps"
        )

    def begin_step(self, tokens: int) -> bool:
        """Whether there is a step left to do; it counts as begun then. No decoupled learner trains past the budget."""
        if self.begun_tokens >= self.budget_tokens:
            return False
        self.begun_tokens += tokens
        return True

    def abandon_step(self, tokens: int) -> None:
        """A step that was begun will not be done."""
        self.begun_tokens -= tokens

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around a training step."""
        began = time.process_time()
        if self.first_step is None:
            self.first_step = began
        yield
        self.compute_s += time.process_time() - began

    def trained(self, tokens: int, virtual_s: float, loss: Any) -> None:
        """A step is done, whose computing took so much virtual time.

        Raises:
            Stopped: nobody wants the run any more.
        """
        self.steps += 1
        self.tokens += tokens
        self.busy_s += virtual_s
        self._losses.append(loss)
        last = self.points[-1].measures["value"] if self.points else float("nan")
        if not self.progress(min(1.0, self.tokens / self.budget_tokens), last):
            raise Stopped

    def measure(self, model: nn.Module, merged_tokens: float, virtual_s: float) -> None:
        """Add a point: these parameters, now."""
        began = time.process_time()
        losses = [float(loss) for loss in self._losses]
        train_loss = sum(losses) / len(losses) if losses else (self.points[-1].train_loss if self.points else 0.0)
        self._losses.clear()
        measures = self.task.evaluate(model)
        self.points.append(Point(self.tokens, merged_tokens, virtual_s, train_loss, measures))
        self.evaluate_s += time.process_time() - began

    def result(self, virtual_s: float, **more: Any) -> dict[str, Any]:
        """All of it as JSON types; `digest` names the curve to the last bit."""
        points = [asdict(point) for point in self.points]
        now = time.process_time()
        processor_s = now - (now if self.first_step is None else self.first_step)
        available_s = virtual_s * (1 if self.run.method == "single" else self.run.learners)
        stay_s = min(virtual_s, self.run.scavenge_until_s) - self.run.scavenge_from_s
        available_s += 0.0 if self.run.method == "single" else (self.run.scavengers or 0) * max(0.0, stay_s)
        return {
            "measure": self.task.measure,
            "higher_is_better": self.task.higher_is_better,
            "final": points[-1]["measures"],
            "points": points,
            "digest": hashlib.sha256(dumps(points).encode()).hexdigest()[:32],
            "steps": self.steps,
            "tokens": self.tokens,
            "virtual_s": virtual_s,
            "goodput": self.busy_s / available_s if available_s else 0.0,
            "wall_s": time.perf_counter() - self.began,
            "processor_s": processor_s,
            "compute_s": self.compute_s,
            "evaluate_s": self.evaluate_s,
            "overhead": (processor_s - self.evaluate_s) / self.compute_s - 1 if self.compute_s else 0.0,
            **more,
        }
