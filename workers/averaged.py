"""Which buffers of a model are average-only tensors: what it gathers in training beside its parameters.

BatchNorm's running mean and variance are such, or the bias of a router. They have no gradient and no optimizer. Each
learner moves them by its own data, so a merge is their mean, and the model that is given out has it.

They are the buffers in floating point that the model's state dict has. One that is not persistent is no part of the
model (a rotary table). These stay a learner's own besides, as what cannot be averaged or would be spoilt by it:

- counters and other whole numbers;
- a table with infinities, as attention masks are;
- what lies beside packed numbers: the scales of a quantized weight, which go with this learner's codes;
- what lies elsewhere than the trained parameters, is no plain dense tensor, or shares memory with what travels.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.wire import MAX_DIMS, MAX_TEXT_CHARS, MergeRule
from diloco.workers.names import Buffer, named_buffers

FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
NOT_PACKED = FLOATING | {torch.bool, torch.int64, torch.complex64, torch.complex128}
"""What a module computes with or counts in; more than one number of another kind is a store of packed ones."""
VARIANCE = "running_var"
"""What torch calls the variance of its own normalisations, and others after it."""


def averaged_buffers(model: nn.Module, trained: Iterable[torch.Tensor]) -> dict[str, Buffer]:
    """The model's average-only buffers by name, in the order of its state dict.

    trained: the tensors that are trained, at least one.

    Raises:
        UsageError: one has no shape yet.
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
    """A variance is never negative, whatever rounding makes of it."""
    return "variance" if buffer.key == VARIANCE else "average"


def _floating(model: nn.Module) -> Iterator[tuple[Buffer, torch.Tensor]]:
    """Those that are plain dense tensors of floating-point numbers, and no scales."""
    packed: dict[int, bool] = {}
    for buffer in named_buffers(model):
        tensor, owner = buffer.tensor, buffer.owner
        if tensor is None or tensor.dtype not in FLOATING:
            continue
        if is_lazy(tensor):
            raise UsageError(f"buffer {buffer.name} has no shape yet: run the model once, with a first batch, before")
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
    """First and last byte of a tensor's memory, and one more; of another's that lies between them nothing is known."""
    length = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()
