"""Check which models and optimizers a learner takes, before anything is connected.

A process holds the trained tensors, or its shards of them, as plain dense tensors on one device. `ranks.topology` finds
the processes that form one learner. Frozen parameters may be of any kind (quantized, on another device): they do not
travel. Any other model would fail later, mostly silently, so it is refused here with a remedy.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import structlog
import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.workers.moments.trial import share_kept
from diloco.workers.names import named_parameters
from diloco.workers.parameters import local_of, resharding, trained_tensors

# Attributes in which wrappers keep the optimizer that they wrap.
WRAPS_AS = ("optimizer", "optim", "_optimizer")

# Share of an adopted value that must survive; an optimizer without a copy of the weights keeps all of it.
MIN_KEPT = 0.9
# Parts of the class names of wrappers that keep a copy of the weights and cannot be tried.
WITH_COPIES = ("lookahead", "schedulefree")


def check_model(model: Any) -> torch.device:
    """Return the device of the model's trained tensors; make a sharded model hold its shards.

    Raises:
        UsageError: names the tensor or module, and the remedy.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}: pass the torch.nn.Module to train")
    resharding(model)()
    for name, parameter in named_parameters(model):
        if hasattr(parameter, "ds_id"):
            raise UsageError(
                f"parameter {name} is partitioned by DeepSpeed ZeRO-3: shard the model with fully_shard instead, or "
                "train it whole in each process"
            )
    trained = trained_tensors(model)
    for name, tensor in trained.items():
        _check_tensor(name, local_of(tensor))
    first, device = next((name, tensor.device) for name, tensor in trained.items())
    for name, tensor in trained.items():
        if tensor.device != device:
            raise UsageError(
                f"trained parameters are on several devices: {first} on {device}, {name} on {tensor.device}. Move all "
                "parameters that require a gradient to one device; frozen ones may be elsewhere"
            )
    _check_memory({name: local_of(tensor) for name, tensor in trained.items()})
    return device


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError if a trained tensor is not a plain dense one with values."""
    if tensor.is_meta:
        raise UsageError(
            f"parameter {name} is on the meta device, without values: load the model's weights first, or give it a "
            "device with `model.to_empty(device=...)` and initialise it"
        )
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"parameter {name} is sparse ({tensor.layout}): trained tensors must be dense; convert it or freeze it"
        )
    if hasattr(type(tensor), "__tensor_flatten__") or tensor.is_quantized:
        raise UsageError(
            f"parameter {name} is a {type(tensor).__name__}, which holds its values in other tensors: freeze it "
            "(requires_grad_(False)), train adapters next to it, or convert it to a plain tensor"
        )
    if any(stride == 0 and side > 1 for stride, side in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError(f"parameter {name} is expanded, so several elements share memory: make it .contiguous()")


def _check_memory(trained: Mapping[str, torch.Tensor]) -> None:
    """Refuse two trained tensors in the same memory: adopting one would overwrite the other.

    One Parameter under two names is a single tensor, and allowed.
    """
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in trained.items()
        if tensor.is_contiguous()
        and tensor.numel()  # others are left out: non-contiguous tensors may be interleaved without overlapping
    )
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise UsageError(
                f"parameters {first} and {second} share memory without being the same parameter: tie them with the "
                "same nn.Parameter in both modules (`head.weight = embedding.weight`), not with its `.data`"
            )


def check_optimizer(model: nn.Module, optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that keeps the moments: the given one, or the one that it wraps.

    Wrappers such as those of Accelerate, Fabric and torchft share the state of the optimizer that they wrap, and are
    followed to it. An optimizer with a state of its own is not a mere wrapper, and is returned itself.

    Raises:
        UsageError: it is not an optimizer, or it has none of the model's trained parameters.
    """
    if optimizer is None:
        return None
    inner = _unwrap(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer, a wrapper that has one as its "
            "`.optimizer`, or None (moments are then neither saved nor shared)"
        )
    held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    if not any(id(tensor) in held for tensor in trained_tensors(model).values()):
        raise UsageError(
            f"optimizer ({type(optimizer).__name__}) holds none of the model's trained parameters: create it from "
            "`model.parameters()` of the model passed here, after the last `.to()`, copy or wrapping"
        )
    return inner


def check_adoptions(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that would undo what is adopted into the parameters; log it if one cannot be tried.

    Raises:
        UsageError: names it.
    """
    trained, tried = {id(tensor) for tensor in trained_tensors(model).values()}, set[str]()
    for optimizer, group in ((one, group) for one in optimizers for group in one.param_groups):
        like = next((one for one in group["params"] if id(one) in trained), None)
        name, words = type(optimizer).__qualname__, [one for one in group.items() if isinstance(one[1], str | bool)]
        if like is None or (form := repr((id(optimizer), like.dim(), like.dtype, words))) in tried:
            continue  # groups that differ only in numbers, such as learning rates, behave alike
        tried.add(form)
        kept = 0.0 if any(known in name.lower() for known in WITH_COPIES) else 1.0
        try:
            kept = min(kept, share_kept(optimizer, group, like))
        except Exception as error:  # an optimizer of the user's own may do anything in its step
            if kept:
                detail = "if it keeps its own copy of the weights, it undoes adopted globals: see Learner(adopted=...)"
                structlog.get_logger().info("adoption_not_tried", optimizer=name, error=str(error)[:200], detail=detail)
        if kept < MIN_KEPT:
            raise UsageError(
                f"optimizer ({name}) continues from its own copy of the weights, so it would undo what is adopted "
                "from the run: pass Learner(..., adopted=fn), where fn(parameter, before) updates its copy"
            )


def _unwrap(optimizer: Any) -> Any:
    for _ in range(8):  # wrappers may be nested; the bound ends a cycle
        wrapped = next((w for name in WRAPS_AS if (w := getattr(optimizer, name, None)) is not None), None)
        if wrapped is None or not hasattr(wrapped, "param_groups"):
            break
        state = getattr(wrapped, "state", None)
        if getattr(optimizer, "state", state) is not state:
            break
        optimizer = wrapped
    return optimizer
