"""What an optimizer keeps for its parameters, known before its first step: from one step of a twin."""

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

OWN = frozenset({"param_groups", "state", "step"})
"""Attributes that a trial's twin has of its own. A `step` among them was put there by a learning-rate scheduler."""
PLAIN = (type, int, float, complex, str, bytes, enum.Enum, np.generic, torch.dtype, torch.device)
MAX_PLAIN_ELEMENTS = 4096
"""Of a tensor that is no parameter, such as a learning rate."""


def trial_shape(dims: int) -> tuple[int, ...]:
    """A small shape; its last sides, by which states are told apart, all differ."""
    return (2,) * max(0, dims - 4) + tuple(range(2, 2 + min(dims, 4)))


def trial_states(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dims: int, count: int
) -> list[dict[str, Any]]:
    """What the optimizer keeps for each of so many parameters of a group, after one step on zero gradients of a twin.

    The twin has the class and copies of plain attributes, nothing else: whatever its step does, short of what is global
    to the program, it cannot reach the optimizer, whose parameters and states therefore stay as they were.

    Raises:
        TypeError: it keeps something for the whole group too (a step count, say), which no moments would bring along;
            or it has an attribute by which the twin would reach what is not its own.
    """
    like = group["params"][0]
    zeros = [torch.zeros(trial_shape(dims), dtype=like.dtype, device=like.device) for _ in range(count)]
    parameters = [nn.Parameter(one) for one in zeros]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    options = {name: _copied(f"option {name!r}", value) for name, value in group.items() if name != "params"}
    tried = {name: _copied(name, value) for name, value in options.items()} | {"params": parameters}
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in OWN:
            hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
            twin.__dict__[name] = OrderedDict() if hooks else _copied(f"attribute {name!r}", value)
    twin.param_groups = [tried]
    twin.state = defaultdict(dict)
    type(optimizer).step(twin)
    del tried["params"]
    changed = [name for name, value in tried.items() if name not in options or not _same(options[name], value)]
    if changed:
        raise TypeError(f"its step changes {changed} of a whole parameter group, beside what it keeps for each tensor")
    return [{n: value for n, value in twin.state[one].items() if value is not None} for one in parameters]


def _copied(what: str, value: Any) -> Any:
    """A copy of a plain value: one from which nothing else is reached."""
    if isinstance(value, torch.Tensor) and not value.requires_grad and value.numel() <= MAX_PLAIN_ELEMENTS:
        return value.clone()
    if value is None or isinstance(value, PLAIN) or (isinstance(value, FunctionType) and value.__closure__ is None):
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_copied(what, entry) for entry in value)
    if type(value) in (dict, OrderedDict, defaultdict):
        copy = value.copy()
        copy.update((key, _copied(what, entry)) for key, entry in value.items())
        return copy
    raise TypeError(f"its {what} holds a {type(value).__qualname__}, which a trial of it could change")


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)
