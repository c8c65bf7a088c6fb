"""What a task is to the lab: a model, examples that can be trained on, and a measure on examples that are not.

The engine knows no more of a task than this: any model whose parameters are the whole of its state fits.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from diloco.studies.quality.settings import LabRun
from diloco.studies.quality.tasks.digits import Digits
from diloco.studies.quality.tasks.images import ImageFolder
from diloco.studies.quality.tasks.text import TextTask
from diloco.studies.quality.tasks.vision import VisionTask

Batch = tuple[torch.Tensor, ...]


class Task(Protocol):
    """A task on one device."""

    measure: str
    """What `evaluate` gives, with its unit, for axes and tables."""
    higher_is_better: bool
    examples: int
    """Training examples in an epoch."""
    example_tokens: int
    """What one example counts in budgets, headers and merge weights."""

    def build(self) -> nn.Module:
        """The model with its initial parameters, on the device; the same for every learner."""
        ...

    def batch(self, chosen: Sequence[tuple[int, int]], learner: int = 0) -> Batch:
        """Training examples, each an (epoch, index) with index in 0..examples-1, for the learner of this number."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """What the inner optimizer descends: a scalar, auxiliary losses included."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Measures on held-out examples, "value" among them; never a training example, nor an auxiliary loss."""
        ...


def open_task(run: LabRun, device: torch.device) -> Task:
    """The task of a run.

    Raises:
        UsageError: no such model, or its data are not here.
    """
    if run.task == "text":
        return TextTask(run, device)
    return VisionTask(run, device, Digits() if run.task == "digits" else ImageFolder(run))
