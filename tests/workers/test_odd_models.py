"""Promises about models that are not made of float32 matrices alone: one table, taken through a run as it is."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.settings import SyncSettings
from diloco.workers.learner import Learner
from diloco.workers.names import named_buffers, named_parameters
from diloco.workers.parameters import FragmentParameters, tensor_table
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import on_bus
from tests.workers.test_parameters import Net

SYNC = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1, tokens=2**40)


class Odd(Net):
    """A `Net` with something odd in it, which takes part in what it computes."""

    def __init__(self, **odd: Any) -> None:
        super().__init__()
        for name, value in odd.items():
            setattr(self, name, value)


class Gated(Net):
    """Parameters without dimensions, as gates and temperatures are, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gate + self.nothing.sum()


def non_contiguous() -> nn.Module:
    model = Net()
    model.body.weight = nn.Parameter(torch.randn(4, 4).t())
    assert not model.body.weight.is_contiguous()
    return model


def parametrized() -> nn.Module:
    model = Net()
    parametrizations.weight_norm(model.body)
    parametrizations.orthogonal(model.head)
    return model


def frozen_part() -> nn.Module:
    model = Net()
    model.table.requires_grad_(False)
    return model


class Mixed(Net):
    """Parameters of several precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(7).bfloat16()), nn.Parameter(torch.zeros(7).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.shift


class Normed(Net):
    """A running mean and variance in float32, a counter beside them, and a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("table_of_ones", torch.ones(7), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x)) * self.table_of_ones


def normed_in_eval() -> nn.Module:
    model = Normed()
    model.norm.requires_grad_(False).eval()
    return model


class Shared(Net):
    """One buffer in two modules, under two names."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.full((7,), 0.5)
        self.head.register_buffer("seen", shared)
        self.register_buffer("seen", shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        self.seen.lerp_(found.detach().mean(0), 0.1)
        return found - self.head.seen


class Replacing(Net):
    """A buffer that is another tensor after each step, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(7))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        self.seen = 0.9 * self.seen + 0.1 * found.detach().mean(0)
        return found * self.scale


def weight_normed() -> nn.Module:
    model = Net()
    parametrizations.weight_norm(model.body)
    parametrizations.spectral_norm(model.head)
    return model


def inductor() -> Any:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs a C++ compiler, and there is none")
    return torch.compile(Net())


MODELS: dict[str, Callable[[], Any]] = {
    "plain": Net,
    "tied weights": lambda: Net(tied=True),
    "no dimensions, and no elements": Gated,
    "a frozen part": frozen_part,
    "a part that gets no gradient": lambda: Odd(unused=nn.Linear(3, 2)),
    "bf16": lambda: Net().to(torch.bfloat16),
    "fp16": lambda: Net().to(torch.float16),
    "several precisions": Mixed,
    "non-contiguous": non_contiguous,
    "parametrizations": parametrized,
    "parametrizations with buffers": weight_normed,
    "BatchNorm": Normed,
    "BatchNorm in fp16": lambda: Normed().to(torch.float16),
    "BatchNorm, frozen in eval": normed_in_eval,
    "BatchNorm under torch.compile": lambda: torch.compile(Normed(), backend="aot_eager"),
    "a shared buffer": Shared,
    "a buffer that is replaced": Replacing,
    "torch.compile": lambda: torch.compile(Net(), backend="aot_eager"),
    "torch.compile to C++": inductor,
}
RUNNING = {"norm.running_mean", "norm.running_var"}
GATHERS = {
    "BatchNorm": RUNNING,
    "BatchNorm in fp16": RUNNING,
    "BatchNorm, frozen in eval": set[str](),
    "BatchNorm under torch.compile": RUNNING,
    "a shared buffer": {"seen"},
    "a buffer that is replaced": {"seen"},
}
"""Buffers in floating point that training moves."""
SLOW = {
    "torch.compile to C++": [
        pytest.mark.slow,
        pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    ]
}


@pytest.fixture(params=[pytest.param(name, marks=SLOW.get(name, [])) for name in MODELS])
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return MODELS[request.param]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of all parameters and buffers, by their names in the plain model; no longer those of the model."""
    buffers = [(buffer.name, buffer.tensor) for buffer in named_buffers(model)]
    return {name: one.detach().clone() for name, one in (*named_parameters(model), *buffers) if one is not None}


def travelling(model: nn.Module) -> set[str]:
    """Trained parameters, and all buffers in floating point."""
    buffers = {buffer.name for buffer in named_buffers(model) if buffer.tensor is not None}
    floating = {name for name, one in values(model).items() if name in buffers and one.is_floating_point()}
    return floating | {name for name, one in named_parameters(model) if one.requires_grad}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_travels_to_another_one_as_it_is(make: Callable[[], Any]) -> None:
    """Snapshots of all fragments, put into another build of it: the same to the last bit. What is frozen stays."""
    torch.manual_seed(1)
    source = make()
    torch.manual_seed(2)
    target = make()
    trained = travelling(source)
    kept = {name: value for name, value in values(target).items() if name not in trained}
    layout = layout_of(tensor_table(source, SYNC))
    assert layout == layout_of(tensor_table(target, SYNC))
    outgoing, incoming = FragmentParameters(source, layout), FragmentParameters(target, layout)
    for p in range(2):
        taken = outgoing.snapshot(p).numpy()
        assert taken.dtype == np.float32
        incoming.overwrite(p, taken)
    assert same(values(target), {name: value for name, value in values(source).items() if name in trained} | kept)


@pytest.mark.redis
def test_a_model_is_trained_merged_and_given_back(redis_server: str, make: Callable[[], Any], request: Any) -> None:
    """By an optimizer that a learner is attached to. The whole global model loads into a plain one, which is frozen,
    tied and typed as this one; and what stands in the model afterwards is what the run has merged."""
    run = f"odd-{list(MODELS).index(request.node.callspec.params['make'])}"
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    before = values(model)
    with ExitStack() as stack:
        stack.enter_context(a_syncer(redis_server, run))
        learner = stack.enter_context(
            Learner(model, optimizer, run=run, redis_url=redis_server, sync=SYNC, encode_on="cpu")
        )
        learner.attach(tokens=7)
        while min(learner.joined.training.rounds.versions) < 2:
            model(torch.arange(7)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        here, state = values(model), learner.globals()
        assert same(values(model), here), "asking for the global model changes nothing here"
        learner.close()
        learner.load_globals()
        after = values(model)
        heads = on_bus(redis_server, run, lambda bus: bus.read_heads(range(2)))
    assert min(head.version for head in heads) >= 2
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    gathers = GATHERS.get(request.node.callspec.params["make"])
    assert gathers is None or gathers == moved & {
        b.name for b in named_buffers(model) if before[b.name].is_floating_point()
    }
    still = {name for name, one in named_parameters(model) if not one.requires_grad or not one.numel()}
    assert not moved & still
    plain = getattr(model, "_orig_mod", model)
    assert state.keys() == plain.state_dict().keys()
    assert {name: (one.dtype, one.shape) for name, one in state.items()} == {
        name: (one.dtype, one.shape) for name, one in plain.state_dict().items()
    }
    plain.load_state_dict(learner.globals())
    assert same(values(model), after), "what it has loaded is what it would be given"
