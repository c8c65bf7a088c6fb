"""Convert between the state of torch optimizers and `Moments`: classify by shape, copy between steps, restore.

docs/explanation/recovery.md ("What an optimizer keeps") says what is a moment or a number, and how steps of a twin show
it.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import structlog
import torch
from pydantic import ValidationError
from torch import nn

from diloco.pipeline.errors import BadPayload
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.moments import OptimizerKind
from diloco.pipeline.payload.codec import digest_of
from diloco.pipeline.wrong_values import complaint
from diloco.workers.copies.snapshots import Snapshot, snapshot_of
from diloco.workers.moments.saved_moments import KeptLayout, Moments, of_moment, slots
from diloco.workers.moments.trial import trial_shape, trial_states
from diloco.workers.names import named_parameters
from diloco.workers.parameters import FragmentTensors, local_of, placed_as

# The inner optimizer, or several that share a model's parameters.
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def _is_plain(value: Any) -> bool:
    """Return whether it is a tensor that holds its own values, and no subclass with, say, codes and scales."""
    return isinstance(value, torch.Tensor) and type(local_of(value)) in (torch.Tensor, nn.Parameter)


def _is_moment(value: Any, shape: tuple[int, ...]) -> bool:
    return _is_plain(value) and value.is_floating_point() and value.shape == shape


def _name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def recoverable_state(model: nn.Module, optimizers: Optimizers | None, layout: Layout) -> "OptimizerState | None":
    """Return the state of the inner optimizers; None if there is none, or if their contents cannot be determined.

    The latter is logged, and so are parts of the state that peers cannot give or take.
    """
    given = several(optimizers)
    if not given:
        return None
    log, names = structlog.get_logger(), ", ".join(type(one).__qualname__ for one in given)
    try:
        state = OptimizerState(model, given, layout)
    except Exception as error:  # an optimizer of the user's own may do anything in its step
        log.warning("moments_not_recoverable", optimizer=names, error=str(error)[:200])
        return None
    if state.others:
        detail = (
            "only its own state folder can restore these: they are neither shaped like a parameter nor single numbers"
        )
        log.info("moments_not_for_peers", optimizer=names, keeps=state.others, detail=detail)
    return state


def several(optimizers: Optimizers | None) -> list[torch.optim.Optimizer]:
    """Return all of them, in their order, as a list."""
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


class _Trial(NamedTuple):
    """The states that an optimizer keeps for the tensors of one group with the same dimensions and precision."""

    group: tuple[int, int]
    """Number of the optimizer, and of its group."""
    shape: tuple[int, ...]
    kept: Mapping[str, Any]
    """A sample value, for its type, of each state of such a tensor; if `stacked`, of the first tensor, which holds the
    states of all."""
    tensors: tuple[str, ...]
    stacked: bool


def _trials(optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[int, str]) -> list[_Trial]:
    """Try every optimizer's groups. tensors: id of each trained tensor -> its name.

    Raises:
        TypeError: what is kept cannot be known.
        Exception: whatever a step raises.
    """
    found: list[_Trial] = []
    seen = set[str]()
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            by_form: dict[tuple[int, str], list[torch.Tensor]] = {}
            for one in group["params"]:
                if (name := tensors.get(id(one))) is not None:
                    if name in seen:
                        raise TypeError(f"parameter {name} is in two optimizers")
                    seen.add(name)
                    by_form.setdefault((one.dim() or 1, str(one.dtype)), []).append(one)
            for (dims, _), alike in sorted(by_form.items()):
                names, shape = [tensors[id(one)] for one in alike], trial_shape(dims, max(one.numel() for one in alike))
                first, *rest = trial_states(optimizer, group, alike[0], shape, min(2, len(names)))
                if rest and rest[0].keys() != first.keys() and rest[0]:
                    raise TypeError(
                        f"it keeps {sorted(first)} for one tensor, but {sorted(rest[0])} for another like it"
                    )
                stacked = bool(rest and first and not rest[0])
                found.append(_Trial((number, place), shape, first, tuple(names), stacked))
    return found


class OptimizerState:
    """The state of a model's optimizers, arranged by the layout of what they train."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, layout: Layout) -> None:
        """Find out what is kept, by a trial for each group and number of dimensions in it.

        The latter matters because some optimizers keep other things for vectors.

        Raises:
            TypeError: what the optimizers keep cannot be known, or is something other than tensors and numbers.
            Exception: whatever an optimizer's step raises.
        """
        self._optimizers = several(optimizers)
        self._parameters = dict(named_parameters(model))
        names = {slot.tensor.name for _, slot in slots(layout)}
        trials = _trials(self._optimizers, {id(self._parameters[name]): name for name in names})
        # Name of each tensor in an optimizer -> a sample value, for its type, of each state that is kept for it.
        self._kept: dict[str, Mapping[str, Any]] = {}
        for one in trials:
            self._kept |= {name: one.kept if not one.stacked or not at else {} for at, name in enumerate(one.tensors)}
        moments, numbers = _classify(trials)
        named = frozenset(moments + numbers)
        # Names of the states that are neither moments nor numbers: peers have no use for them.
        self.others = sorted({name for kept in self._kept.values() for name in kept} - named)
        alike = all(named <= kept.keys() for kept in self._kept.values())
        # A `KeptLayout` says for which tensors each moment is kept.
        self.layout = layout if alike else _kept_layout(layout, moments, self._kept)
        self.kind = self._kind(trials, moments, numbers, alike=alike)

    def _kind(self, trials: Sequence[_Trial], moments: list[str], numbers: list[str], *, alike: bool) -> OptimizerKind:
        """Return the `OptimizerKind` by which peers and checkpoints decide whether states are compatible.

        If not all tensors are alike, two kinds also differ if their groups hold different tensors.
        """
        told = " + ".join(dict.fromkeys(map(_name, self._optimizers)))
        if not alike or any(one.stacked for one in trials):
            whose = [(sorted(one.kept), one.tensors if one.stacked else sorted(one.tensors)) for one in trials]
            told = f"{told}, {digest_of(msgpack.packb(sorted(whose))).hex()[:16]}"
        try:
            return OptimizerKind(optimizer=told, moments=tuple(moments), numbers=tuple(numbers))
        except ValidationError as error:
            raise TypeError(f"its states cannot be named: {complaint(error)}") from error

    @property
    def for_peers(self) -> bool:
        """True if peers can give and take everything that these optimizers need."""
        return bool(self.kind.moments) and not self.others

    def _names(self, tensor: str) -> set[str]:
        """Return the names of a tensor's states that are neither moments nor numbers."""
        return self._kept.get(tensor, {}).keys() & set(self.others)

    def start_copy(self) -> "StateCopy":
        """Begin a copy, with nothing in it yet.

        Raises:
            TypeError: the optimizers' state is not of the form that it had in their trials.
        """
        state: dict[str, Mapping[str, Any]] = {name: {} for name in self._parameters}
        owners = {id(one): optimizer for optimizer in self._optimizers for one in _parameters(optimizer)}
        for name, parameter in self._parameters.items():
            if (owner := owners.get(id(parameter))) is not None:
                state[name] = owner.state.get(parameter, {})
        for name, kept in self._kept.items():
            self._compare(name, kept, {key: value for key, value in state[name].items() if value is not None})
        return StateCopy(self.kind, self.layout, self._parameters, state, self.others)

    def _compare(self, tensor: str, kept: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Refuse the state of a tensor that was stepped, if its form is not the trial's."""

        def alike(name: str, value: Any) -> bool:
            if name in self.kind.moments:
                return _is_moment(value, self._parameters[tensor].shape)
            return _is_number(value) if name in self.kind.numbers else _form(value) == _form(kept[name])

        if state and (state.keys() != kept.keys() or not all(alike(*one) for one in state.items())):
            here, there = ({name: _form(value) for name, value in sorted(one.items())} for one in (state, kept))
            raise TypeError(f"for {tensor} the optimizer keeps {here}, but kept {there} in a trial of a different size")

    def clear(self) -> bool:
        """Empty the optimizers' state, so that they begin fresh; return False if there are none."""
        for one in self._optimizers:
            one.state.clear()
        return bool(self._optimizers)

    def check(self, moments: Moments) -> None:
        """Refuse a checkpoint whose other tensors are not those that the optimizers would continue from.

        Raises:
            BadPayload: names the tensor.
        """
        found: dict[str, set[str]] = {}
        for name, tensor in moments.others:
            found.setdefault(tensor, set()).add(name)
        needed: dict[str, set[str]] = {}
        for at, (_, slot) in enumerate(slots(self.layout)):
            names = self._names(slot.tensor.name) if self._began(moments, slot.tensor.name, at) else set()
            needed.setdefault(slot.tensor.name, set()).update(names)
        for tensor, names in needed.items():
            if found.pop(tensor, set()) != names:
                raise BadPayload(f"{tensor} needs {sorted(names)} besides its moments, and no other tensors")
        if found:
            raise BadPayload(f"there are tensors for {sorted(found)[:3]}, which this model does not train")

    def _began(self, moments: Moments, tensor: str, at: int) -> bool:
        """Return whether the tensor at this place of the layout was ever stepped, as far as can be known."""
        counts = "step" in self.kind.numbers and "step" in self._kept.get(tensor, {})
        return not counts or moments.numbers["step"][at] > 0

    def load(self, moments: Moments) -> None:
        """Put checked moments into the optimizers; learning rates and other options stay their own."""
        by_name = {id(parameter): name for name, parameter in self._parameters.items()}
        states = self._states(moments)
        for optimizer in self._optimizers:
            saved = optimizer.state_dict()
            saved["state"] = {
                number: states[name]
                for packed, group in zip(saved["param_groups"], optimizer.param_groups, strict=True)
                for number, parameter in zip(packed["params"], group["params"], strict=True)
                if (name := by_name.get(id(parameter), "")) in states
            }
            optimizer.load_state_dict(saved)

    def _states(self, moments: Moments) -> dict[str, dict[str, Any]]:
        """Return the state of each tensor by name, except tensors that were never stepped or have no state."""
        states: dict[str, dict[str, Any]] = {}
        for at, (_, slot) in enumerate(slots(self.layout)):
            kept = self._kept.get(slot.tensor.name)
            if kept and self._began(moments, slot.tensor.name, at):
                numbers = {name: values[at] for name, values in moments.numbers.items() if name in kept}
                states[slot.tensor.name] = {name: _number(kept[name], value) for name, value in numbers.items()}
        for name in self.kind.moments:
            for p, slot in slots(of_moment(self.layout, name)):
                if (state := states.get(slot.tensor.name)) is not None:
                    # A copy for each tensor: no views of the flat vector, and aligned as torch's own tensors are.
                    here = state.setdefault(name, torch.empty(slot.tensor.shape, dtype=torch.float32, device="cpu"))
                    flat = torch.from_numpy(moments.flats[p][name][slot.start : slot.stop])
                    here.view(-1)[slot.within] = flat
            for tensor, state in states.items():
                if name in state:
                    parameter = self._parameters[tensor]
                    # With the parameter's memory layout, which fused optimizers take for granted.
                    here = torch.empty_like(local_of(parameter), dtype=torch.float32, device="cpu")
                    state[name] = placed_as(parameter, here.copy_(state[name]))
        for (name, tensor), array in moments.others.items():
            if (state := states.get(tensor)) is not None:
                state[name] = torch.from_numpy(np.array(array)).to(self._kept[tensor][name].dtype)
        return states


def _form(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _classify(trials: Sequence[_Trial]) -> tuple[list[str], list[str]]:
    """Return the names of the moments and of the numbers.

    A name is one of these only if it is one wherever it occurs, and occurs for all tensors of a group or for none.

    Raises:
        TypeError: a state is neither a tensor nor a number, or is a number for only some of a group's tensors.
    """
    moments, numbers = [], []
    for name in sorted({name for one in trials for name in one.kept}):
        having = [one for one in trials if name in one.kept]
        groups = {one.group for one in having}
        whole = all(name in one.kept for one in trials if one.group in groups)
        values = [(one.kept[name], one.shape) for one in having]
        for value, _ in values:
            if not _is_plain(value) and not isinstance(value, (int, float)):
                raise TypeError(f"its state {name!r} is a {type(value).__name__}, neither a plain tensor nor a number")
        if whole and all(_is_moment(value, shape) for value, shape in values):
            moments.append(name)
        elif whole and all(_is_number(value) for value, _ in values):
            numbers.append(name)
        elif not all(isinstance(value, torch.Tensor) for value, _ in values):
            raise TypeError(f"its state {name!r} is a number for some tensors only")
    return moments, numbers


def _kept_layout(layout: Layout, moments: Iterable[str], kept: Mapping[str, Mapping[str, Any]]) -> KeptLayout:
    def keeping(name: str) -> Layout:
        return layout.only(tensor for tensor, states in kept.items() if name in states)

    return KeptLayout(layout.fragments, layout.digest, {name: keeping(name) for name in moments})


def _number(like: Any, value: float) -> Any:
    return torch.tensor(value, dtype=like.dtype, device="cpu") if isinstance(like, torch.Tensor) else type(like)(value)


class _Numbers:
    """The values of one number, for the tensors of a fragment, at one moment.

    A fused optimizer keeps one for each parameter on its device, where every single read would wait for all queued
    work. So these are copied together.
    """

    def __init__(self, values: Sequence[Any], device: torch.device, side: torch.cuda.Stream | None) -> None:
        there = [isinstance(value, torch.Tensor) and value.device == device for value in values]
        ones = [local_of(value.detach()).reshape(1) for value, is_there in zip(values, there, strict=True) if is_there]
        self._there = snapshot_of(torch.cat(ones), side) if ones else None
        self._here = [None if is_there else float(value) for value, is_there in zip(values, there, strict=True)]

    def read(self) -> list[float]:
        """Return one value a tensor; may wait for the device."""
        there = iter([] if self._there is None else self._there.tensor().tolist())
        return [float(next(there)) if value is None else value for value in self._here]


class StateCopy:
    """A copy of an optimizer's state in progress: one fragment between each two steps.

    So no step is delayed by more than one fragment's copy, and a device never holds two copies of all moments. The
    fragments come from neighbouring steps, which is harmless for statistics.
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
        names = {moment: [slot.tensor.name for _, slot in slots(of_moment(layout, moment))] for moment in kind.moments}
        self._tensors = {
            moment: FragmentTensors(
                {name: _moment(state[name].get(moment), parameters[name]) for name in names[moment]},
                of_moment(layout, moment),
            )
            for moment in kind.moments
        }
        self._device = next((parameters[slot.tensor.name].device for _, slot in slots(layout)), torch.device("cpu"))
        on_cuda = self._device.type == "cuda"
        self._side = torch.cuda.Stream(self._device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._snapshots: list[dict[str, Snapshot]] = []
        self._numbers: dict[str, list[_Numbers]] = {name: [] for name in kind.numbers}  # one entry a fragment
        self._others: dict[tuple[str, str], Snapshot] = {}

    @torch.no_grad()
    def advance(self) -> bool:
        """Copy the next fragment (training thread, between two steps); return True if it was the last."""
        p = len(self._snapshots)
        tensors = [slot.tensor.name for slot in self._layout.fragments[p].slots]
        for name, numbers in self._numbers.items():
            values = [self._state[tensor].get(name, 0.0) for tensor in tensors]
            numbers.append(_Numbers(values, self._device, self._side))
        for name in self._other_names:
            for tensor in tensors:
                if name in self._state[tensor]:
                    self._others[name, tensor] = snapshot_of(self._state[tensor][name].detach().clone(), self._side)
        self._snapshots.append({name: moment.snapshot(p) for name, moment in self._tensors.items()})
        return len(self._snapshots) == len(self._layout.fragments)

    def moments(self) -> Moments:
        """Return the whole copy; may wait for a device, so never call it in the training thread."""
        return Moments(
            kind=self._kind,
            flats=tuple({name: snapshot.numpy() for name, snapshot in flats.items()} for flats in self._snapshots),
            numbers={name: tuple(chain(*(one.read() for one in told))) for name, told in self._numbers.items()},
            others={key: _array(snapshot.tensor()) for key, snapshot in self._others.items()},
        )


def _moment(value: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Return a moment; for a parameter that was never stepped, zeros."""
    return torch.zeros_like(parameter, requires_grad=False) if value is None else value


def _array(host: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    return array
