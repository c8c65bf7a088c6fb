"""A model's parameters by the names that they have in the plain model, whatever wraps it.

`torch.compile`, DistributedDataParallel, DataParallel, Fabric and activation checkpointing put the model, or a part of
it, in a module of their own, and its name before the parameters' names. A LightningModule that has all of its
parameters in one submodule is such a wrapper too: elsewhere that submodule is the model. All learners of a run, and
who loads what they have trained, have the names without.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco.pipeline.errors import UsageError

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
"""Submodules by which wrappers are known: torch.compile's, activation checkpointing's, Fabric's."""


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """As `model.named_parameters`, in its order, with the plain model's names.

    Raises:
        UsageError: two have the same name there.
    """
    wrappers, seen = _wrappers(model), set[str]()
    for wrapped, parameter in model.named_parameters():
        name = _plain(wrapped, wrappers)
        if name in seen:
            raise UsageError(f"two parameters are {name} without what wraps them: rename one, or unwrap the model")
        seen.add(name)
        yield name, parameter


class Buffer(NamedTuple):
    """A persistent buffer of a model, by where it is kept: it may be replaced by another tensor at any step."""

    name: str
    """With the plain model's names."""
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """As it is now; None: it has gone."""
        found: torch.Tensor | None = getattr(self.owner, self.key, None)
        return found


def named_buffers(model: nn.Module) -> Iterator[Buffer]:
    """The buffers that the model's state dict has, in its order; what modules share is there once.

    Raises:
        UsageError: two, or one and a parameter, have the same name in the plain model.
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
                raise UsageError(
                    f"two tensors are {name} without what wraps them: rename a buffer, or unwrap the model"
                )
            names.add(name)
            yield Buffer(name, module, key)


def state_with(model: nn.Module, values: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
    """The model's state dict with the plain model's names, and other values of some parameters and buffers.

    values: by name, flat (elements,); copied to the tensor's type and shape. What is tied has its value under all of
        its names.
    """
    state = model.state_dict(keep_vars=True)  # first: it has a sharded model hold its shards
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
    """Names of the submodules that a wrapper around them has put into names."""
    found = set[str]()
    for path, module in model.named_modules(remove_duplicate=False):
        outermost = not path or path in found
        found.update(f"{path}.{child}" if path else child for child in _wrapped_by(module, outermost))
    return frozenset(found)


def _wrapped_by(module: nn.Module, outermost: bool) -> Iterable[str]:
    """outermost: nothing but wrappers are around it."""
    if isinstance(module, DistributedDataParallel | nn.DataParallel):
        return ["module"]
    if wrapped := [child for child in WRAPPED if child in module._modules]:
        return wrapped
    if outermost and _is_lightning(module):
        owners = {name.partition(".")[0] for name, _ in module.named_parameters(remove_duplicate=False)}
        return owners & module._modules.keys() if len(owners) == 1 else []
    return []


def _is_lightning(module: nn.Module) -> bool:
    """Told by name: it is nothing that this package needs to have."""
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
