"""Find out what an optimizer keeps, and whether it respects an adoption, by stepping a twin before its first step.

The twin has the same class and copies of plain attributes, nothing else. So its steps cannot reach the optimizer, whose
parameters and states stay unchanged, unless a step changes something global to the program. The twin has parameters of
its own. They have more than 4,096 elements if the real ones do, because some optimizers quantize their state from that
size on.
"""

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

# Attributes that the twin does not copy. An instance's `step` was put there by a learning-rate scheduler.
OWN = frozenset({"param_groups", "state", "step"})
PLAIN = (type, int, float, complex, str, bytes, enum.Enum, np.generic, torch.dtype, torch.device)
# Largest tensor that is copied although it is not a parameter, such as a learning rate.
MAX_PLAIN_ELEMENTS = 4096
# Shapes of trials with up to four dimensions: a little over 4,096 elements, in 18 blocks of 256.
SHAPES: tuple[tuple[int, ...], ...] = (), (4608,), (64, 72), (4, 16, 72), (2, 4, 8, 72)
# Steps before and after a trial adoption: some optimizers return to a copy of the weights every sixth step.
STEPS = 6


def trial_shape(dims: int, elements: int) -> tuple[int, ...]:
    """Return a small shape whose trailing dimensions all differ, since they identify a state.

    elements: size of the largest real tensor. A vector is never larger, because some optimizers keep a square of its
    size.
    """
    if dims == 1:
        return (max(2, min(elements, *SHAPES[1])),)
    return SHAPES[dims] if dims < len(SHAPES) else (2,) * (dims - 4) + (SHAPES[4] if dims < 10 else (2, 3, 4, 5))


def trial_states(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor, shape: tuple[int, ...], count: int
) -> list[dict[str, Any]]:
    """Return what the optimizer keeps for each of `count` parameters of a group, after stepping a copy of it.

    Args:
        optimizer: the optimizer to copy.
        group: one of its parameter groups.
        like: a parameter of the group.
        shape: of the trial's parameters.
        count: number of them.

    Raises:
        TypeError: it keeps something for the whole group too (a step count, say), which moments would not contain; or
            it has an attribute through which the copy could reach shared objects.
    """
    with _twin(optimizer, group, like, shape, count) as (twin, parameters, noise):
        (tried,) = twin.param_groups
        options = _options(tried)
        for _ in range(2):
            for one in parameters:
                one.grad = noise()
            type(optimizer).step(twin)
    changed = [
        name
        for name, value in tried.items()
        if name != "params" and (name not in options or not _same(options[name], value))
    ]
    if changed:
        raise TypeError(f"its step changes {changed} of a whole parameter group, besides its state for each tensor")
    return [{n: value for n, value in twin.state[one].items() if value is not None} for one in parameters]


def share_kept(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor) -> float:
    """Return how much of a value written into a parameter is left some steps later, relative to the old value.

    1.0 means all of it. These steps have no gradient and no learning rate, so whatever takes it back is a copy of the
    weights in the optimizer.

    Raises:
        Exception: see `trial_states`; or whatever a step raises.
    """
    dims = like.dim() or 1
    with _twin(optimizer, group, like, trial_shape(dims, like.numel()), 1) as (twin, (parameter,), noise):
        (tried,) = twin.param_groups
        for _ in range(STEPS):
            parameter.grad = noise()
            type(optimizer).step(twin)
        if isinstance(tried.get("lr"), int | float | torch.Tensor):
            tried["lr"] = tried["lr"] * 0
        before = _values(parameter)
        with torch.no_grad():
            parameter.add_(noise())
        written = _values(parameter) - before
        for _ in range(STEPS):
            parameter.grad = torch.zeros_like(parameter)
            type(optimizer).step(twin)
    after, both = _values(parameter), before @ written
    new = (before @ before) * (written @ after) - both * (before @ after)
    old = (written @ written) * (before @ after) - both * (written @ after)
    return float(new / old) if old else 1.0  # a ratio, since weight decay shrinks the old and the new alike


def _values(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().cpu().double().flatten().clone()


@contextmanager
def _twin(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor, shape: tuple[int, ...], count: int
) -> Iterator[tuple[Any, list[nn.Parameter], Callable[[], torch.Tensor]]]:
    """Yield a twin of the optimizer, its `count` parameters in one group, and a function that makes noise like them.

    The program's random states are not changed.
    """
    numbers = torch.Generator(device="cpu").manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(shape, generator=numbers, device="cpu").to(like.device, like.dtype)

    with torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        parameters = [nn.Parameter(noise()) for _ in range(count)]
        twin: Any = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            if name not in OWN:
                hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
                twin.__dict__[name] = OrderedDict() if hooks else _copied(f"attribute {name!r}", value)
        twin.param_groups = [_options(group) | {"params": parameters}]
        twin.state = defaultdict(dict)
        if callable(train := getattr(twin, "train", None)):  # schedule-free optimizers step only in training mode
            train()
        yield twin, parameters, noise


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(f"option {name!r}", value) for name, value in group.items() if name != "params"}


def _copied(what: str, value: Any) -> Any:
    """Return a copy of a plain value, from which no other object can be reached."""
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
    raise TypeError(f"its {what} holds a {type(value).__qualname__}, which a trial step could change")


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)
