"""Digests of the frozen parameters, by which learners verify that they all train on the same ones.

Buffers are left out, because they change in training. A digest covers values, shape and precision, independently of the
device and the memory layout.
"""

from collections.abc import Iterator
from typing import Any

import structlog
import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import frozen_head
from diloco.pipeline.messages.wire import MAX_TENSORS, MAX_TEXT_CHARS
from diloco.workers.names import named_parameters

# Copied to host memory at a time.
PIECE_BYTES = 64 * 2**20
LONG_WORK_BYTES = 2**30
NOT_COMPARED = "or set same_frozen=False in all learners, so that frozen tensors are not compared"


def check_frozen(model: nn.Module) -> None:
    """Refuse at once what `frozen_digests` could not hash.

    Raises:
        UsageError: names the frozen parameter.
    """
    frozen = dict(_frozen(model))
    if len(frozen) > MAX_TENSORS:
        raise UsageError(
            f"the model has {len(frozen)} frozen tensors, but at most {MAX_TENSORS} are allowed: fuse some, "
            f"{NOT_COMPARED}"
        )
    for name, tensor in frozen.items():
        if tensor.is_meta or is_lazy(tensor):
            raise UsageError(
                f"frozen parameter {name} has no values here: load the model's weights first, {NOT_COMPARED}"
            )
        if len(name) > MAX_TEXT_CHARS:
            raise UsageError(
                f"frozen parameter {name[:60]}... has a name of {len(name)} characters, but at most {MAX_TEXT_CHARS} "
                f"are allowed: shorten it, {NOT_COMPARED}"
            )


@torch.no_grad()
def frozen_digests(model: nn.Module) -> tuple[tuple[str, bytes], ...]:
    """Return (name, xxh3-128) of every frozen parameter. Reads all of them, a piece at a time.

    Raises:
        UsageError: one cannot be read.
    """
    frozen = list(_frozen(model))
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in frozen)
    if size >= LONG_WORK_BYTES:
        structlog.get_logger().info("frozen_hashing_started", tensors=len(frozen), bytes=size)
    digests = []
    for name, tensor in frozen:
        digest = xxhash.xxh3_128()
        try:
            _feed(digest, tensor)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
            raise UsageError(
                f"frozen parameter {name}, a {type(tensor).__name__}, cannot be read for comparison ({error}): "
                f"convert it, {NOT_COMPARED}"
            ) from error
        digests.append((name, digest.digest()))
    return tuple(digests)


def _frozen(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in named_parameters(model) if not tensor.requires_grad)


def _feed(digest: Any, tensor: torch.Tensor) -> None:
    """Hash shape, precision and values; for a quantized tensor, those of all tensors that it consists of."""
    if hasattr(tensor, "full_tensor"):  # sharded: a collective call, which all ranks of the learner make here
        tensor = tensor.full_tensor()
    digest.update(frozen_head(tuple(tensor.shape), str(tensor.dtype)))
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # of torch's wrapper subclasses
        parts = {name: getattr(tensor, name) for name in names}
    elif tensor.is_quantized:
        parts = {"values": tensor.int_repr(), "dequantized": tensor.dequantize()}
    else:
        _feed_values(digest, tensor.detach())
        parts = _scales(tensor)
    for name in sorted(parts):
        digest.update(name.encode())
        _feed(digest, parts[name])


def _scales(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that bitsandbytes keeps with a parameter's codes, so that other scales are noticed."""
    state: Any = getattr(tensor, "quant_state", None)
    beside = dict(state.as_dict()) if hasattr(state, "as_dict") else {}
    beside |= {name: getattr(tensor, name, None) for name in ("CB", "SCB")}
    return {str(name): value for name, value in beside.items() if isinstance(value, torch.Tensor)}


def _feed_values(digest: Any, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    for start in range(0, len(flat), PIECE_BYTES):
        digest.update(flat[start : start + PIECE_BYTES].cpu().numpy())
