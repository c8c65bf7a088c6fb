"""Name a model's parameters as in the plain model, whatever wraps it.

`torch.compile`, DistributedDataParallel, DataParallel, Fabric and activation checkpointing put the model, or a part of
it, into a module of their own, whose name precedes the parameters' names. A LightningModule with all of its
parameters in one submodule counts as such a wrapper: other programs load that submodule as the model. All learners of a
run, and programs that load what they have trained, use the names without wrappers.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco.pipeline.errors import UsageError

# Submodule names of wrappers: torch.compile's, activation checkpointing's, Fabric's.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what `model.named_parameters` does, in its order, under the plain model's names.

    Raises:
        UsageError: two parameters have the same name there.
    """
    wrappers, seen = _wrappers(model), set[str]()
    for wrapped, parameter in model.named_parameters():
        name = _plain(wrapped, wrappers)
        if name in seen:
            raise UsageError(f"two parameters are named {name}, wrappers left out: rename one, or unwrap the model")
        seen.add(name)
        yield name, parameter


class Buffer(NamedTuple):
    """A persistent buffer of a model, identified by its place, since any step may replace it by another tensor."""

    name: str
    """Name in the plain model."""
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that is there now; None: there is none any more."""
        found: torch.Tensor | None = getattr(self.owner, self.key, None)
        return found


def named_buffers(model: nn.Module) -> Iterator[Buffer]:
    """Yield the buffers of the model's state dict, in its order; buffers that modules share appear once.

    Raises:
        UsageError: two of them, or one and a parameter, have the same name in the plain model.
    """
    wrappers, seen = _wrappers(model), dict[int, torch.Tensor]()
    names = {name for name, _ in named_parameters(model)}
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen[id(buffer)] = buffer
            name = _plain(f"{path}.{key}" if path else key, wrappers)
            if name in names:
                raise UsageError(f"two tensors are {name} without their wrappers: rename a buffer, or unwrap the model")
            names.add(name)
            yield Buffer(name, module, key)


def state_with(model: nn.Module, values: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
    """Return the model's state dict under the plain model's names, with other values of some tensors.

    values: by name, flat (elements,); copied to the tensor's type and shape. Tied tensors get theirs under all of their
    names.
    """
    state = model.state_dict(keep_vars=True)  # must come first: it makes a sharded model hold its shards
    named: dict[str, torch.Tensor | None] = dict(named_parameters(model))
    named |= {buffer.name: buffer.tensor for buffer in named_buffers(model)}
    others = {
        id(tensor): torch.tensor(values[name], dtype=tensor.dtype, device="cpu").reshape(tensor.shape)
        for name, tensor in named.items()
        if tensor is not None and name in values
    }
    wrappers, found = _wrappers(model), dict[str, Any]()
    for name, value in state.items():
        own = value.detach() if isinstance(value, torch.Tensor) else value
        found[_plain(name, wrappers)] = others.get(id(value), own)
    return found


def _wrappers(model: nn.Module) -> frozenset[str]:
    """Return the paths of the submodules whose names come only from a wrapper around them."""
    found = set[str]()
    for path, module in model.named_modules(remove_duplicate=False):
        outermost = not path or path in found
        found.update(f"{path}.{child}" if path else child for child in _wrapped_by(module, outermost))
    return frozenset(found)


def _wrapped_by(module: nn.Module, outermost: bool) -> Iterable[str]:
    """Return the names of the children that this module only wraps. outermost: it is itself inside wrappers only."""
    if isinstance(module, DistributedDataParallel | nn.DataParallel):
        return ["module"]
    if wrapped := [child for child in WRAPPED if child in module._modules]:
        return wrapped
    if outermost and _is_lightning(module):
        owners = {name.partition(".")[0] for name, _ in module.named_parameters(remove_duplicate=False)}
        return owners & module._modules.keys() if len(owners) == 1 else []
    return []


def _is_lightning(module: nn.Module) -> bool:
    """Return whether it is a LightningModule, judging by names: Lightning may not be installed."""
    return any(
        kind.__name__ == "LightningModule" and kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        for kind in type(module).__mro__
    )


def _plain(name: str, wrappers: frozenset[str]) -> str:
    kept, path = [], ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        if path not in wrappers:
            kept.append(part)
    return ".".join(kept)
