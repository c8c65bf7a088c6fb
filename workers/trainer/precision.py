"""How a model is called in training: in fp32 or bf16, with activations kept or recomputed.

In bf16 the model itself stays in float32 and holds the masters: the optimizer steps them, the learner publishes and
adopts them, and checkpoints contain them. Next to it there is a bf16 copy, which does all the computation. The copy's
parameters are rounded from the masters at each call, and its gradients are added to the masters' in float32.
"""

import copy
from typing import Any

import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import LearnerSettings
from diloco.workers.trainer.models.gpt import GPT
from diloco.workers.trainer.recipe import forward_of


def training_forward(model: nn.Module, device: torch.device, settings: LearnerSettings) -> nn.Module:
    """Return the module to call with a batch in place of the model; gradients arrive in the model's parameters.

    Raises:
        UsageError: raised by `forward_of` or `checkpoint_activations`.
    """
    if settings.checkpoint_activations:
        checkpoint_activations(model)
    if settings.precision == "fp32":
        return forward_of(model, device, settings.compile)
    return InBf16(model, device, settings.compile)


def checkpoint_activations(model: nn.Module) -> None:
    """Make the backward pass recompute the activations within each block instead of keeping them.

    Gradients do not change.

    Raises:
        UsageError: a transformers model does not support this.
    """
    if isinstance(model, GPT):
        model.checkpoint_activations = True
        return
    named: Any = model
    newer = getattr(named, "activation_checkpointing_enable", None)  # not in all 5.x
    try:
        (newer or named.gradient_checkpointing_enable)({"use_reentrant": False})
    except ValueError as error:  # what transformers raises for such a model
        raise UsageError(f"DILOCO_CHECKPOINT_ACTIVATIONS: {error}") from error


class InBf16(nn.Module):
    """A bf16 copy of a float32 model that computes in its place.

    The copy takes 2 bytes per parameter in addition to the masters' 4. It shares the model's buffers.
    """

    def __init__(self, model: nn.Module, device: torch.device, compiled: bool) -> None:
        super().__init__()
        self._masters: list[torch.Tensor] = list(model.parameters())
        self._rounded: list[torch.Tensor] = [
            nn.Parameter(p.detach().bfloat16(), p.requires_grad) for p in self._masters
        ]
        memo: dict[int, Any] = {id(p): rounded for p, rounded in zip(self._masters, self._rounded, strict=True)}
        memo |= {id(buffer): buffer for buffer in model.buffers()}
        self._computes = forward_of(copy.deepcopy(model, memo), device, compiled)
        for master, rounded in zip(self._masters, self._rounded, strict=True):
            if rounded.requires_grad:
                rounded.register_post_accumulate_grad_hook(_to(master))  # type: ignore[no-untyped-call]

    def forward(self, tokens: torch.Tensor) -> Any:
        """Compute the model's output with parameters freshly rounded from the masters."""
        with torch.no_grad():
            torch._foreach_copy_(self._rounded, self._masters)
        return self._computes(tokens)


def _to(master: torch.Tensor) -> Any:
    """Return a hook that adds a gradient in float32 to the master's gradient and clears the original."""

    def add(rounded: torch.Tensor) -> None:
        gradient = rounded.grad
        assert gradient is not None  # noqa: S101  # the hook is called once it is there
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
        rounded.grad = None

    return add
