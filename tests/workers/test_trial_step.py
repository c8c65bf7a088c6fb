"""Promises about the trial by which a learner finds what an optimizer keeps: it never reaches the user's optimizer."""

import copy
import math
import resource
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.settings import SyncSettings
from diloco.workers.checks.model_checks import check_optimizer
from diloco.workers.moments.optimizer_state import OptimizerState, recoverable_state
from diloco.workers.moments.trial import trial_shape
from diloco.workers.parameters import tensor_table
from tests.workers.test_optimizer_state import layout, step
from tests.workers.test_parameters import Net


class Accelerated(torch.optim.Optimizer):
    """As `AcceleratedOptimizer` of accelerate 1.15: no `super().__init__`, properties that set what is wrapped."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.scaler = None
        self._is_overflow = False

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Managed(Accelerated):
    """As torchft's wrapper: another name for what is wrapped, and a manager that counts steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.optim = optimizer
        self.manager = [0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.manager[0] += 1
        self.optim.step(closure)


class Sharp(torch.optim.Optimizer):
    """As common implementations of SAM: the base optimizer steps, on param_groups that both hold."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old_p"] = parameter.data.clone()
        self.base_optimizer.step()


class Listing(torch.optim.SGD):
    """Holds its parameters in a list of its own, beside groups."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.flat = parameters

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.flat:
                parameter.add_(1.0)


class Closing(torch.optim.SGD):
    """Holds functions that reach the optimizer itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.after = [lambda: self.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for call in self.after:
            call()


class Counting(torch.optim.AdamW):
    """Counts in a plain attribute, and in one of the groups' lists."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.counts = {"steps": [0]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counts["steps"][0] += 1
        super().step()


class Failing(torch.optim.AdamW):
    """Its step does half of its work."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups.clear()
        raise RuntimeError("not without my closure")


def patched(parameters: Any) -> torch.optim.Optimizer:
    """`step` is a bound method in its `__dict__`, as learning-rate schedulers put there."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    plain = optimizer.step

    def patch(self: Any, closure: Any = None) -> Any:
        self.called = True
        return plain(closure)

    optimizer.step = MethodType(patch, optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return optimizer


def hooked(parameters: Any) -> torch.optim.Optimizer:
    """Counts its steps where `inside` sees them."""
    optimizer: Any = torch.optim.AdamW(parameters, lr=0.1)
    optimizer.called = []
    optimizer.register_step_post_hook(lambda *_: optimizer.called.append(1))
    return optimizer


MADE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "accelerated": (lambda p: Accelerated(torch.optim.AdamW(p, lr=0.1)), True),
    "accelerated twice": (lambda p: Accelerated(Accelerated(torch.optim.AdamW(p, lr=0.1))), True),
    "managed": (lambda p: Managed(torch.optim.AdamW(p, lr=0.1)), True),
    "patched step": (patched, True),
    "counting": (Counting, True),
    "hooked": (hooked, True),
    "sharp": (Sharp, False),
    "listing": (Listing, False),
    "closing": (Closing, False),
    "failing": (Failing, False),
}


def inside(optimizer: Any) -> Any:
    """All that can be seen of an optimizer and of those inside it, as plain values."""
    if isinstance(optimizer, torch.optim.Optimizer):
        seen = {name: inside(value) for name, value in vars(optimizer).items() if name != "after"}
        return seen | {"groups": inside(optimizer.param_groups), "state": inside(dict(optimizer.state))}
    if isinstance(optimizer, torch.Tensor):
        return id(optimizer), optimizer.detach().flatten().tolist()
    if isinstance(optimizer, dict):
        return [(inside(key), inside(value)) for key, value in optimizer.items()]
    return [inside(value) for value in optimizer] if isinstance(optimizer, list | tuple) else repr(optimizer)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_the_trial_leaves_the_optimizer_as_it_was(name: str, gradients: bool) -> None:
    """Its state, its groups, whatever it wraps and counts, and the parameters; with gradients there, too. What can be
    known safely is known, else moments are not recovered."""
    make, known = MADE[name]
    torch.manual_seed(0)
    model = Net()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    if gradients:
        model(torch.arange(7)).square().sum().backward()
    before = copy.deepcopy(inside(optimizer)), [p.detach().clone() for p in model.parameters()]
    numbers = torch.get_rng_state()
    inner = check_optimizer(model, optimizer)
    assert inner is not None
    state = recoverable_state(model, inner, layout(model))
    assert inside(optimizer) == before[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), numbers)
    assert (state is not None) is known
    if state is not None:
        assert state.kind.moments == ("exp_avg", "exp_avg_sq")
        step(model, optimizer)


def test_a_trial_is_small_for_as_many_dimensions_as_there_are() -> None:
    """And larger than 4,096 elements, from which on some optimizers quantize; in whole blocks of 256, as those ask."""
    for dims in range(1, 17):
        shape = trial_shape(dims, 2**30)
        assert len(shape) == dims
        assert 4096 < math.prod(shape) <= 2**19
        assert math.prod(shape) % 256 == 0
        assert len(set(shape[-4:])) == len(shape[-4:])
    assert trial_shape(1, 768) == (768,)
    assert trial_shape(1, 1) == (2,)


def test_joining_with_many_dimensions_takes_no_memory() -> None:
    """Sixteen, of two each: under 200 MB, where a shape of sides that all differ would take 1.4 PB."""
    model = nn.Module()
    model.p = nn.Parameter(torch.zeros((2,) * 16))
    layout_ = layout_of(tensor_table(model, SyncSettings(fragments=1)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = OptimizerState(model, torch.optim.AdamW(model.parameters()), layout_)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    assert state.for_peers
