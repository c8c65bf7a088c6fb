"""What a task is to the lab: a model, examples that can be trained on, and a measure on examples that are not.

The engine knows no more of a task than this: any model whose parameters are the whole of its state fits.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks.captions import CaptionTask
from diloco_studies.quality.tasks.text import TextTask
from diloco_studies.quality.tasks.vision import VisionTask

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

    same_kernels: bool
    """Whether a step runs the same kernels whatever its batch holds, and draws nothing: CUDA may replay it."""

    def build(self) -> nn.Module:
        """The model with its initial parameters, on the device; the same for every learner."""
        ...

    def batch(self, chosen: Sequence[tuple[int, int]]) -> Batch:
        """Training examples, each an (epoch, index) with index in 0..examples-1."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """What the inner optimizer descends: a scalar, auxiliary losses included."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Measures on held-out examples: "value", and "exact" where a task has answers that are right or not.

        Never of a training example, and without auxiliary losses.
        """
        ...


def open_task(run: LabRun, device: torch.device) -> Task:
    """The task of a run.

    Raises:
        UsageError: no such model, or its data are not here.
    """
    match run.task:
        case "text":
            return TextTask(run, device)
        case "captions":
            return CaptionTask(run, device)
        case "digits":
            return VisionTask(run, device)
