"""Select the buffers of a model that are averaged: what it gathers in training in addition to its parameters.

They are the floating-point buffers in the model's state dict, such as BatchNorm's running mean.
docs/explanation/formats.md ("Average-only tensors") says how they are merged, and which buffers stay a learner's own.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.wire import MAX_DIMS, MAX_TEXT_CHARS, MergeRule
from diloco.workers.names import Buffer, named_buffers

FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
# The types in which a module computes or counts. More than one number of another type is a store of packed ones.
NOT_PACKED = FLOATING | {torch.bool, torch.int64, torch.complex64, torch.complex128}
# Torch's name for the running variance of its normalisations, which other libraries use too.
VARIANCE = "running_var"


def averaged_buffers(model: nn.Module, trained: Iterable[torch.Tensor]) -> dict[str, Buffer]:
    """Return the model's averaged buffers by name, in the order of its state dict.

    trained: the trained tensors, at least one.

    Raises:
        UsageError: a buffer has no shape yet.
    """
    found: dict[str, Buffer] = {}
    if not (floating := list(_floating(model))):
        return found
    taken = list(trained)
    device, spans = taken[0].device, [_span(tensor) for tensor in taken]
    for buffer, tensor in floating:
        span = _span(tensor)
        apart = all(span[1] <= start or stop <= span[0] for start, stop in spans)
        if tensor.device != device or not apart or bool(tensor.isinf().any()):
            continue
        spans.append(span)
        found[buffer.name] = buffer
    return found


def average_rule(buffer: Buffer) -> MergeRule:
    """Return the merge rule of a buffer: a variance must not become negative by rounding."""
    return "variance" if buffer.key == VARIANCE else "average"


def _floating(model: nn.Module) -> Iterator[tuple[Buffer, torch.Tensor]]:
    """Yield the buffers that are plain dense tensors of floating-point numbers, except scales of packed numbers."""
    packed: dict[int, bool] = {}
    for buffer in named_buffers(model):
        tensor, owner = buffer.tensor, buffer.owner
        if tensor is None or tensor.dtype not in FLOATING:
            continue
        if is_lazy(tensor):
            raise UsageError(
                f"buffer {buffer.name} has no shape yet: run the model once on a first batch before "
                "creating the learner"
            )
        expanded = any(not stride and side > 1 for stride, side in zip(tensor.stride(), tensor.shape, strict=True))
        wrapped = hasattr(type(tensor), "__tensor_flatten__") or hasattr(tensor, "device_mesh")
        if tensor.is_meta or expanded or wrapped or not tensor.numel():
            continue
        if tensor.dim() > MAX_DIMS or len(buffer.name) > MAX_TEXT_CHARS:
            continue
        if id(owner) not in packed:
            packed[id(owner)] = _has_packed(owner)
        if not packed[id(owner)]:
            yield buffer, tensor


def _has_packed(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(one is not None and one.dtype not in NOT_PACKED and (is_lazy(one) or one.numel() > 1) for one in own)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor's memory and the end behind its last one.

    Other tensors between the two may or may not share memory with it.
    """
    length = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()
