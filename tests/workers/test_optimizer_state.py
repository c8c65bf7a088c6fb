"""Promises about an optimizer's state on its way out and back in."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco.pipeline.errors import BadPayload
from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.settings import SyncSettings
from diloco.workers.copies.snapshots import Snapshot, snapshot_of
from diloco.workers.moments import optimizer_state
from diloco.workers.moments.optimizer_state import OptimizerState, recoverable_state
from diloco.workers.moments.saved_moments import Moments, check
from diloco.workers.parameters import tensor_table
from tests.workers.test_parameters import Net, TiedWords

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, amsgrad=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


class Picture(nn.Module):
    """Has parameters that are not contiguous: one in `channels_last`, one a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.head = nn.Parameter(torch.randn(3, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.seen(x[:4].view(1, 1, 2, 2).expand(1, 2, 2, 2).float()).flatten() @ self.head.t()
        return out


def layout(model: nn.Module) -> Layout:
    return layout_of(tensor_table(model, SyncSettings(fragments=2)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()


def trained(
    make: Callable[[Any], torch.optim.Optimizer], steps: int = 3, kind: type[nn.Module] = Net
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def taken(state: OptimizerState) -> Moments:
    made = state.start_copy()
    while not made.advance():
        pass
    return made.moments()


@pytest.mark.parametrize("kind", [Net, TiedWords, Picture])
@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_goes_on_as_if_it_had_never_stopped(name: str, kind: type[nn.Module]) -> None:
    """Loaded into a fresh optimizer beside the same parameters, the next steps are the same to the last bit.

    Also where several fragments have some rows each of one tensor's moments, and where parameters are not contiguous.
    """
    model, optimizer = trained(MAKERS[name], kind=kind)
    assert any(slot.tensor.rows for f in layout(model).fragments for slot in f.slots) is (kind is not Net)
    moments = taken(OptimizerState(model, optimizer, layout(model)))
    check(moments, layout(model))
    again = kind()
    again.load_state_dict(model.state_dict())
    fresh = MAKERS[name]([p for p in again.parameters() if p.requires_grad])
    state = OptimizerState(again, fresh, layout(again))
    assert state.kind == moments.kind
    state.check(moments)
    state.load(moments)
    for _ in range(2):
        step(model, optimizer)
        step(again, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_what_is_a_moment_and_what_a_number() -> None:
    def kind_of(name: str) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
        state = OptimizerState(*trained(MAKERS[name], 0), layout(Net()))
        return state.kind.moments, state.kind.numbers, state.for_peers

    assert kind_of("AdamW") == (("exp_avg", "exp_avg_sq"), ("step",), True)
    assert kind_of("SGD momentum") == (("momentum_buffer",), (), True)
    assert kind_of("Adafactor") == ((), ("step",), False)


def test_learning_rates_and_groups_stay_the_new_ones() -> None:
    model, optimizer = trained(MAKERS["AdamW"])
    moments = taken(OptimizerState(model, optimizer, layout(model)))
    parameters = list(model.parameters())
    other = torch.optim.AdamW([{"params": parameters[2:]}, {"params": parameters[:2], "lr": 0.5}], lr=0.25)
    OptimizerState(model, other, layout(model)).load(moments)
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.5]
    for parameter, state in optimizer.state.items():
        assert torch.equal(other.state[parameter]["exp_avg"], state["exp_avg"])


def test_a_copy_is_one_fragment_a_step_and_keeps_its_moment() -> None:
    """Each fragment is as it was at its own step boundary, numbers included, whatever is trained on."""
    model, optimizer = trained(MAKERS["AdamW"])
    state = OptimizerState(model, optimizer, layout(model))
    first = taken(state)
    made = state.start_copy()
    assert not made.advance()
    step(model, optimizer)
    assert made.advance()
    second = taken(state)
    step(model, optimizer)
    mixed = made.moments()
    for p, source in enumerate((first, second)):
        for name in ("exp_avg", "exp_avg_sq"):
            np.testing.assert_array_equal(mixed.flats[p][name], source.flats[p][name])
    assert set(first.numbers["step"]) == {3.0}
    assert set(mixed.numbers["step"]) == {3.0, 4.0}


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused amsgrad", "Adafactor"])
def test_no_number_of_an_optimizer_is_read_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA that would wait for all that is queued there, once a parameter: those of a fragment are one copy."""
    model, optimizer = trained(MAKERS[name])
    state, copies = OptimizerState(model, optimizer, layout(model)), list[Snapshot]()

    def waits(_: torch.Tensor) -> float:
        raise AssertionError("a tensor is read by itself")

    def counted(values: torch.Tensor, *side: Any) -> Snapshot:
        copies.append(snapshot_of(values, *side))
        return copies[-1]

    monkeypatch.setattr(optimizer_state, "snapshot_of", counted)
    for read in ("__float__", "item"):
        monkeypatch.setattr(torch.Tensor, read, waits)
    made = state.start_copy()
    while not made.advance():
        pass
    monkeypatch.setattr(torch.Tensor, "cpu", waits)
    moments = made.moments()
    assert set(moments.numbers["step"]) == {3.0}
    assert len(copies) == len(layout(model).fragments) + len(moments.others)


def test_a_tensor_that_was_never_stepped_begins_fresh() -> None:
    model = Net()
    optimizer = torch.optim.AdamW([model.head.weight, model.body.weight], lr=0.1)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    optimizer.step()
    moments = taken(OptimizerState(model, optimizer, layout(model)))
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    OptimizerState(model, again, layout(model)).load(moments)
    assert list(again.state) == [model.head.weight]


@pytest.mark.parametrize("keeps", ["a number that changes", "a tensor that changes in place", "a new one"])
def test_an_optimizer_that_keeps_its_step_for_a_whole_group_is_left_alone(
    keeps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its moments alone, beside a step count of 0, would be worse than none; the trial leaves the count alone."""

    class Grouped(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                if keeps == "a tensor that changes in place":
                    group["count"] += 1
                else:
                    group["count"] = group.get("count", 0) + 1

    model = Net()
    optimizer = Grouped(model.parameters(), lr=0.1)
    if keeps != "a new one":
        optimizer.param_groups[0]["count"] = torch.zeros(1) if "tensor" in keeps else 0
    assert recoverable_state(model, optimizer, layout(model)) is None
    assert "changes ['count'] of a whole parameter group" in capsys.readouterr().out
    assert optimizer.param_groups[0].get("count", 0) == 0


def test_an_optimizer_whose_groups_keep_different_states_is_another_kind_than_one_whose_groups_do_not() -> None:
    model = Net()
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest, "amsgrad": True}]
    mixed = recoverable_state(model, torch.optim.AdamW(groups, lr=0.1), layout(model))
    same = recoverable_state(model, torch.optim.AdamW([groups[0], {"params": rest, "lr": 0.5}]), layout(model))
    other = [{"params": rest[1:]}, {"params": [first, rest[0]], "amsgrad": True}]
    others = recoverable_state(model, torch.optim.AdamW(other, lr=0.1), layout(model))
    assert mixed is not None
    assert same is not None
    assert others is not None
    assert mixed.for_peers
    assert mixed.kind.moments == others.kind.moments == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert len({mixed.kind, same.kind, others.kind}) == 3


@pytest.mark.parametrize("fault", ["size", "not finite", "negative", "name", "step", "count", "fragments"])
def test_what_an_optimizer_could_not_go_on_from_is_refused(fault: str) -> None:
    model, optimizer = trained(MAKERS["AdamW"])
    good = taken(OptimizerState(model, optimizer, layout(model)))
    check(good, layout(model))
    flat, numbers, flats = dict(good.flats[1]), dict(good.numbers), list(good.flats)
    if fault == "size":
        flat["exp_avg"] = flat["exp_avg"][:-1]
    elif fault == "not finite":
        flat["exp_avg"] = np.full_like(flat["exp_avg"], np.nan)
    elif fault == "negative":
        flat["exp_avg_sq"] = -np.ones_like(flat["exp_avg_sq"])
    elif fault == "name":
        flat["other"] = flat.pop("exp_avg")
    elif fault == "step":
        numbers["step"] = (-1.0, *numbers["step"][1:])
    elif fault == "count":
        numbers["step"] = numbers["step"][1:]
    flats[1] = flat
    bad = Moments(good.kind, tuple(flats[:1] if fault == "fragments" else flats), numbers)
    with pytest.raises(BadPayload):
        check(bad, layout(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_copy_is_of_its_step_and_goes_back_to_the_device() -> None:
    """Moments and `step`, both on the device, are not torn by the next step, and the optimizer goes on from them."""
    model = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = OptimizerState(model, optimizer, layout(model))
    for count in range(1, 6):
        model(torch.ones(4, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        made = state.start_copy()
        while not made.advance():
            pass
        kept = {name: dict(optimizer.state[t]) for name, t in model.named_parameters()}
        kept = {name: {key: value.clone() for key, value in one.items()} for name, one in kept.items()}
        optimizer.step()
        moments = made.moments()
        assert set(moments.numbers["step"]) == {float(2 * count - 1)}
        state.load(moments)
        for name, tensor in model.named_parameters():
            now = optimizer.state[tensor]
            assert all(torch.equal(now[key], kept[name][key]) for key in kept[name])
            assert now["exp_avg"].is_cuda
        optimizer.step()
