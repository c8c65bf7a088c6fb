"""What an optimizer keeps for its parameters, and whether it keeps an adoption: from steps of a twin, before its first.

The twin has the class and copies of plain attributes, nothing else: whatever its steps do, short of what is global to
the program, they cannot reach the optimizer, whose parameters and states therefore stay as they were. It has parameters
of its own. They have more than 4,096 elements where the real ones do: from so many on some optimizers quantize what
they keep.
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

OWN = frozenset({"param_groups", "state", "step"})
"""Attributes that a trial's twin has of its own. A `step` among them was put there by a learning-rate scheduler."""
PLAIN = (type, int, float, complex, str, bytes, enum.Enum, np.generic, torch.dtype, torch.device)
MAX_PLAIN_ELEMENTS = 4096
"""Of a tensor that is no parameter, such as a learning rate."""
SHAPES: tuple[tuple[int, ...], ...] = (), (4608,), (64, 72), (4, 16, 72), (2, 4, 8, 72)
"""Of trials with up to four dimensions: little more than 4,096 elements, in 18 blocks of 256."""
STEPS = 6
"""Before an adoption that is tried, and after it: some optimizers go back to a copy of the weights every sixth step."""


def trial_shape(dims: int, elements: int) -> tuple[int, ...]:
    """A small shape; its last sides, by which states are told apart, all differ.

    elements: of the largest real tensor. No vector is larger: some optimizers keep a square of its size.
    """
    if dims == 1:
        return (max(2, min(elements, *SHAPES[1])),)
    return SHAPES[dims] if dims < len(SHAPES) else (2,) * (dims - 4) + (SHAPES[4] if dims < 10 else (2, 3, 4, 5))


def trial_states(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor, shape: tuple[int, ...], count: int
) -> list[dict[str, Any]]:
    """What the optimizer keeps for each of so many parameters of a group, once its twin has stepped.

    Args:
        like: a parameter of the group.
        shape: of those of the trial.

    Raises:
        TypeError: it keeps something for the whole group too (a step count, say), which no moments would bring along;
            or it has an attribute by which the twin would reach what is not its own.
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
        raise TypeError(f"its step changes {changed} of a whole parameter group, beside what it keeps for each tensor")
    return [{n: value for n, value in twin.state[one].items() if value is not None} for one in parameters]


def share_kept(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor) -> float:
    """How much of what is written into a parameter is there some steps later, beside what was there before: 1 is all.

    These steps have no gradient and no learning rate: what they take back comes from a copy that the optimizer has.

    Raises:
        Exception: as `trial_states`, or whatever a step raises.
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
    return float(new / old) if old else 1.0  # a decay takes of both alike


def _values(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().cpu().double().flatten().clone()


@contextmanager
def _twin(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor, shape: tuple[int, ...], count: int
) -> Iterator[tuple[Any, list[nn.Parameter], Callable[[], torch.Tensor]]]:
    """A twin of the optimizer with so many parameters in one group; they; and what makes noise of their form.

    The program's random numbers stay as they were.
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
        if callable(train := getattr(twin, "train", None)):  # a schedule-free one steps in its training mode alone
            train()
        yield twin, parameters, noise


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(f"option {name!r}", value) for name, value in group.items() if name != "params"}


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
