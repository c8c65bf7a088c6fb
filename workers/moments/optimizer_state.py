"""Between a torch optimizer's state and `Moments`: told apart by shape, copied at step boundaries, put back.

A state that is a floating tensor shaped like its parameter is a moment; one element is a number (Adam's `step`);
other tensors go along in checkpoints. What an optimizer keeps is known before its first step from a trial step of
a twin on a parameter of its own.
"""

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from pydantic import ValidationError
from torch import nn

from diloco.pipeline.errors import BadPayload
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.moments import OptimizerKind
from diloco.workers.moments.moments import Moments, slots
from diloco.workers.names import named_parameters
from diloco.workers.parameters import FragmentTensors, Snapshot

OWN = frozenset({"param_groups", "state", "step"})
"""Attributes that a trial's twin has of its own. A `step` among them was put there by a learning-rate scheduler."""
PLAIN = (type, int, float, complex, str, bytes, enum.Enum, np.generic, torch.dtype, torch.device)
MAX_PLAIN_ELEMENTS = 4096
"""Of a tensor that is no parameter, such as a learning rate."""


def trial_shape(dims: int) -> tuple[int, ...]:
    """A small shape; its last sides, by which states are told apart, all differ."""
    return (2,) * max(0, dims - 4) + tuple(range(2, 2 + min(dims, 4)))


def trial_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dims: int) -> dict[str, Any]:
    """What the optimizer keeps for a parameter of a group, after one step on zero gradients of a twin.

    The twin has the class and copies of plain attributes, nothing else: whatever its step does, short of what is global
    to the program, it cannot reach the optimizer, whose parameters and states therefore stay as they were.

    Raises:
        TypeError: it keeps something for the whole group too (a step count, say), which no moments would bring along;
            or it has an attribute by which the twin would reach what is not its own.
    """
    like = group["params"][0]
    parameter = nn.Parameter(torch.zeros(trial_shape(dims), dtype=like.dtype, device=like.device))
    parameter.grad = torch.zeros_like(parameter)
    options = {name: _copied(f"option {name!r}", value) for name, value in group.items() if name != "params"}
    tried = {name: _copied(name, value) for name, value in options.items()} | {"params": [parameter]}
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
    return {name: value for name, value in twin.state[parameter].items() if value is not None}


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


def _form(value: Any) -> tuple[Any, ...]:
    return (type(value), value.dtype, value.shape) if isinstance(value, torch.Tensor) else (type(value),)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def _is_moment(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == shape


def recoverable_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, layout: Layout
) -> "OptimizerState | None":
    """The state of an optimizer; None where there is none, or it cannot be told what it keeps, which is said."""
    if optimizer is None:
        return None
    try:
        return OptimizerState(model, optimizer, layout)
    except Exception as error:  # an optimizer of the user's own may do anything in its step
        structlog.get_logger().warning(
            "moments_not_recoverable", optimizer=type(optimizer).__qualname__, error=str(error)[:200]
        )
        return None


class OptimizerState:
    """The state of one optimizer, seen through the layout of the model that it trains."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
        """By a trial for each number of dimensions: some optimizers keep other things for vectors.

        Raises:
            TypeError: what the optimizer keeps cannot be known, or is no tensors and numbers.
            Exception: whatever the optimizer's step raises.
        """
        self._optimizer, self._layout = optimizer, layout
        self._parameters = dict(named_parameters(model))
        dims = {len(slot.tensor.shape) or 1 for _, slot in slots(layout)}
        trials = {trial_shape(n): self._trial(n) for n in sorted(dims)}
        self._kept = {len(shape): frozenset(state) for shape, state in trials.items()}
        """Names of the states by a tensor's number of dimensions."""
        self._forms = {name: value for state in trials.values() for name, value in state.items()}
        """A value of each state, for its type."""
        self.kind = self._kind(trials)
        """What the optimizer keeps."""

    def _kind(self, trials: Mapping[tuple[int, ...], Mapping[str, Any]]) -> OptimizerKind:
        kind = type(self._optimizer)
        for name, value in self._forms.items():
            if not isinstance(value, (torch.Tensor, int, float)):
                raise TypeError(f"its state {name!r} is a {type(value).__name__}, neither a tensor nor a number")

        def everywhere(name: str, test: Callable[[Any, tuple[int, ...]], bool]) -> bool:
            return all(name in state and test(state[name], shape) for shape, state in trials.items())

        moments = sorted(name for name in self._forms if everywhere(name, _is_moment))
        numbers = sorted(name for name in self._forms if everywhere(name, lambda value, _: _is_number(value)))
        try:
            return OptimizerKind(
                optimizer=f"{kind.__module__}.{kind.__qualname__}", moments=tuple(moments), numbers=tuple(numbers)
            )
        except ValidationError as error:
            raise TypeError(f"its states cannot be named: {error.errors()[0]['msg']}") from error

    def _trial(self, dims: int) -> dict[str, Any]:
        """The same in all parameter groups, which may differ in their options.

        Raises:
            TypeError: it is not.
        """
        first, *others = (
            trial_state(self._optimizer, group, dims) for group in self._optimizer.param_groups if group["params"]
        )
        forms = {name: _form(value) for name, value in first.items()}
        for other in others:
            if {name: _form(value) for name, value in other.items()} != forms:
                raise TypeError(f"it keeps {sorted(first)} in one parameter group and {sorted(other)} in another")
        return first

    @property
    def for_peers(self) -> bool:
        """Peers can give and take all that this optimizer needs."""
        return bool(self.kind.moments) and not self._others()

    def _others(self) -> list[str]:
        return sorted(set(self._forms) - {*self.kind.moments, *self.kind.numbers})

    def start_copy(self) -> "StateCopy":
        """A copy with nothing in it yet."""
        state = {name: self._optimizer.state.get(parameter, {}) for name, parameter in self._parameters.items()}
        return StateCopy(self.kind, self._layout, self._parameters, state, self._others())

    def check(self, moments: Moments) -> None:
        """Refuse a checkpoint whose other tensors are not those that the optimizer would go on from.

        Raises:
            BadPayload: naming the tensor.
        """
        found: dict[str, set[str]] = {}
        for name, tensor in moments.others:
            found.setdefault(tensor, set()).add(name)
        for at, (_, slot) in enumerate(slots(self._layout)):
            began = "step" not in moments.numbers or moments.numbers["step"][at] > 0
            names = self._kept[len(slot.tensor.shape) or 1] - {*self.kind.moments, *self.kind.numbers}
            if found.pop(slot.tensor.name, set()) != (names if began else set()):
                raise BadPayload(f"{slot.tensor.name} needs {sorted(names)} beside its moments, and no other tensors")
        if found:
            raise BadPayload(f"there are other tensors for {sorted(found)[:3]}, which this model does not train")

    def load(self, moments: Moments) -> None:
        """Put checked moments into the optimizer; learning rates and other options stay its own."""
        saved = self._optimizer.state_dict()
        by_name = {id(parameter): name for name, parameter in self._parameters.items()}
        states = self._states(moments)
        saved["state"] = {
            number: states[name]
            for packed, group in zip(saved["param_groups"], self._optimizer.param_groups, strict=True)
            for number, parameter in zip(packed["params"], group["params"], strict=True)
            if (name := by_name.get(id(parameter), "")) in states
        }
        self._optimizer.load_state_dict(saved)

    def _states(self, moments: Moments) -> dict[str, dict[str, Any]]:
        """State of each tensor by name; none for one that was never stepped."""
        states: dict[str, dict[str, Any]] = {}
        for at, (p, slot) in enumerate(slots(self._layout)):
            numbers = {name: values[at] for name, values in moments.numbers.items()}
            if numbers.get("step", 1.0) == 0:
                continue
            # a copy each: tensors of their own, aligned as torch's are
            state: dict[str, Any] = {
                name: torch.from_numpy(flat[slot.start : slot.stop].copy()).reshape(slot.tensor.shape)
                for name, flat in moments.flats[p].items()
            }
            state |= {name: self._number(name, value) for name, value in numbers.items()}
            state |= {
                name: torch.from_numpy(np.array(array)).to(self._forms[name].dtype)
                for (name, tensor), array in moments.others.items()
                if tensor == slot.tensor.name
            }
            states[slot.tensor.name] = state
        return states

    def _number(self, name: str, value: float) -> Any:
        form = self._forms[name]
        return torch.tensor(value, dtype=form.dtype) if isinstance(form, torch.Tensor) else type(form)(value)


class StateCopy:
    """A copy of an optimizer's state in the making: one fragment at each step boundary.

    So no step is held up by more than one fragment's copy, and a device never holds two copies of all moments. The
    fragments are of neighbouring steps, which statistics can bear.
    """

    def __init__(
        self,
        kind: OptimizerKind,
        layout: Layout,
        parameters: Mapping[str, torch.Tensor],
        state: Mapping[str, Mapping[str, Any]],
        others: list[str],
    ) -> None:
        self._kind, self._layout, self._state, self._other_names = kind, layout, state, others
        names = [slot.tensor.name for _, slot in slots(layout)]
        self._tensors = {
            moment: FragmentTensors(
                {name: _moment(state[name].get(moment), parameters[name]) for name in names}, layout
            )
            for moment in kind.moments
        }
        self._snapshots: list[dict[str, Snapshot]] = []
        self._numbers: dict[str, list[Any]] = {name: [] for name in kind.numbers}
        self._others: dict[tuple[str, str], torch.Tensor] = {}

    @torch.no_grad()
    def advance(self) -> bool:
        """Copy the next fragment (training thread, between two steps); True if it was the last."""
        p = len(self._snapshots)
        for slot in self._layout.fragments[p].slots:
            state = self._state[slot.tensor.name]
            for name, values in self._numbers.items():
                value = state.get(name, 0.0)
                values.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)
            for name in self._other_names:
                if name in state:
                    self._others[name, slot.tensor.name] = state[name].detach().clone()
        self._snapshots.append({name: tensors.snapshot(p) for name, tensors in self._tensors.items()})
        return len(self._snapshots) == len(self._layout.fragments)

    def moments(self) -> Moments:
        """The whole copy; may wait for a device, so never call it in the training thread."""
        return Moments(
            kind=self._kind,
            flats=tuple({name: snapshot.numpy() for name, snapshot in flats.items()} for flats in self._snapshots),
            numbers={name: tuple(map(float, values)) for name, values in self._numbers.items()},
            others={key: _array(tensor) for key, tensor in self._others.items()},
        )


def _moment(value: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """A moment; of a parameter that was never stepped, zeros."""
    return torch.zeros_like(parameter, requires_grad=False) if value is None else value


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    host = tensor.cpu()
    array: npt.NDArray[Any] = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    return array
