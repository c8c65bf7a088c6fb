"""An inner step's parts: the optimizer, a learner's with what a run says otherwise, and gradients. For every method.

Models of the lab are so small that a GPU waits for the next kernel's launch most of the time: a step of 0.9M parameters
is some 400 of them. A graph launches them all at once.
"""

import torch
from torch import nn

from diloco.workers.parameters import described, trained_tensors
from diloco.workers.trainer.recipe import make_optimizers
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks.tasks import Batch, Task

EAGER_STEPS = 3
"""What libraries set up at a first call must not be part of the graph."""


def inner_optimizers(model: nn.Module, run: LabRun) -> list[torch.optim.Optimizer]:
    """As learners have them, but for the run's `beta2` and `eps`, and Muon for hidden matrices if it has that.

    Muon's steps are scaled to the length of AdamW's (Liu et al., Muon is scalable for LLM training, 2025), so both take
    one learning rate.
    """
    hidden = hidden_matrices(model) if run.optimizer == "muon" else []
    taken = {id(p) for p in hidden}
    others = (p for p in model.parameters() if id(p) not in taken)
    optimizers = make_optimizers(others, run.lr, run.weight_decay)
    if hidden:
        optimizers.insert(0, torch.optim.Muon(hidden, run.lr, run.weight_decay, adjust_lr_fn="match_rms_adamw"))
    for group in (group for one in optimizers if isinstance(one, torch.optim.AdamW) for group in one.param_groups):
        if run.beta2 is not None:
            group["betas"] = (group["betas"][0], run.beta2)
        if run.eps is not None:
            group["eps"] = run.eps
    return optimizers


def hidden_matrices(model: nn.Module) -> list[torch.Tensor]:
    """The trained matrices but for embeddings and output heads, whose rows or columns stand for tokens."""
    seen, tensors = described(model), trained_tensors(model)
    names = [one.name for one in seen.trained if one.matrix]
    return [tensors[name] for name in names if name not in seen.heads()]


class Gradients:
    """Those of one model: a forward and a backward pass, on CUDA replayed as one graph.

    Its parameters may be written to in place between calls, and not replaced.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task, self._model = task, model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._eager_left = EAGER_STEPS
        self._wanted = task.same_kernels and next(model.parameters()).is_cuda
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch = ()
        """What the graph reads."""

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Put the gradient of a batch into each `.grad`, which has none before; the loss, on the device."""
        if not self._wanted or self._eager_left > 0:
            self._eager_left -= 1
            return self._compute(batch)
        if self._graph is None:
            self._capture(batch)
        if [one.shape for one in batch] != [one.shape for one in self._batch]:
            return self._compute(batch)
        return self._replay(batch)

    def _compute(self, batch: Batch) -> torch.Tensor:
        loss = self._task.loss(self._model, batch)
        torch.autograd.backward(loss)
        return loss.detach()

    def _capture(self, batch: Batch) -> None:
        self._batch = tuple(one.clone() for one in batch)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._compute(self._batch)
        self._grads = [p.grad for p in self._parameters]

    def _replay(self, batch: Batch) -> torch.Tensor:
        assert self._graph is not None  # noqa: S101  # captured before
        for kept, new in zip(self._batch, batch, strict=True):
            kept.copy_(new)
        self._graph.replay()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return self._loss.clone()
