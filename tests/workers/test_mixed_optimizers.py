"""Promises about optimizers that keep different things for different tensors: Muon with AdamW, however made."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import SyncSettings
from diloco.workers.learner import Learner
from diloco.workers.moments.optimizer_state import OptimizerState, recoverable_state
from diloco.workers.moments.peers import Peers
from diloco.workers.moments.saved_moments import Moments
from diloco_studies.virtual.memory import MemoryBus, MemoryStore
from diloco_studies.virtual.virtual_time import VirtualClock, run_virtual
from tests import samples
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_optimizer_state import layout, taken
from tests.workers.test_parameters import Net
from tests.workers.test_recovery import Party

Optimizers = list[torch.optim.Optimizer]
BETAS = {"exp_avg": 0.9, "exp_avg_sq": 0.95}


class MuonAdamW(torch.optim.Optimizer):
    """As nanochat's: one optimizer, whose groups say by which of the two they are stepped."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.02})
        self._rate = torch.tensor(0.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (self.adamw if group["kind"] == "adamw" else self.muon)(group)

    @torch.no_grad()
    def adamw(self, group: dict[str, Any]) -> None:
        for one in group["params"]:
            if one.grad is None:
                continue
            state = self.state[one]
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(one), "exp_avg_sq": torch.zeros_like(one)}
            state["step"] += 1
            state["exp_avg"].lerp_(one.grad, 0.1)
            state["exp_avg_sq"].lerp_(one.grad.square(), 0.05)
            corrected = {name: state[name] / (1 - b ** state["step"]) for name, b in BETAS.items()}
            one.sub_(self._rate.fill_(group["lr"]) * corrected["exp_avg"] / (corrected["exp_avg_sq"].sqrt() + 1e-8))

    @torch.no_grad()
    def muon(self, group: dict[str, Any]) -> None:
        for one in group["params"]:
            if one.grad is not None:
                buffer = self.state[one].setdefault("momentum_buffer", torch.zeros_like(one))
                buffer.lerp_(one.grad, 0.05)
                one.sub_(group["lr"] * buffer / (buffer.norm() + 1e-8))


class Stacking(MuonAdamW):
    """As nanochat's at present: matrices of one shape have theirs in the first one's state, one of it factored."""

    @torch.no_grad()
    def muon(self, group: dict[str, Any]) -> None:
        first, count = group["params"][0], len(group["params"])
        state = self.state[first]
        if not state:
            state["momentum_buffer"] = torch.zeros(count, *first.shape)
            state["second_momentum_buffer"] = torch.zeros(count, first.shape[-2], 1)
        gradients = torch.stack([one.grad for one in group["params"]])
        state["momentum_buffer"].lerp_(gradients, 0.05)
        state["second_momentum_buffer"].lerp_(gradients.square().mean(-1, keepdim=True), 0.1)
        for one, mean, square in zip(
            group["params"], state["momentum_buffer"], state["second_momentum_buffer"], strict=True
        ):
            one.sub_(group["lr"] * mean / (square.sqrt() + 1e-8))


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and all else with the embedding."""
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    matrices = [one for name, one in trained if one.dim() == 2 and not name.startswith("table")]
    return matrices, [one for _, one in trained if all(one is not other for other in matrices)]


def two(model: nn.Module) -> Optimizers:
    matrices, rest = split(model)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def in_one(kind: type[MuonAdamW]) -> Callable[[nn.Module], Optimizers]:
    def make(model: nn.Module) -> Optimizers:
        matrices, rest = split(model)
        return [kind([{"params": rest, "kind": "adamw"}, {"params": matrices, "kind": "muon"}])]

    return make


class Deep(Net):
    """A `Net` with a second matrix of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.deeper = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.deeper(self.body(self.table(x))))


def deep_two(model: nn.Module) -> Optimizers:
    """As `Stacking` needs it: matrices of one shape in a group."""
    matrices = [model.body.weight, model.deeper.weight]  # type: ignore[union-attr]
    rest = [one for one in model.parameters() if all(one is not other for other in matrices)]
    return [Stacking([{"params": matrices, "kind": "muon"}, {"params": rest, "kind": "adamw"}])]


MAKERS: dict[str, Callable[[nn.Module], Optimizers]] = {
    "two optimizers": two,
    "one, each state with its tensor": in_one(MuonAdamW),
    "one, stacked": deep_two,
    "some amsgrad": lambda m: [
        torch.optim.AdamW([{"params": split(m)[0]}, {"params": split(m)[1], "amsgrad": True}], lr=0.01)
    ],
    "one that counts and one that does not": lambda m: [
        torch.optim.SGD(split(m)[0], lr=0.01, momentum=0.9),
        torch.optim.Adafactor(split(m)[1], lr=0.01),
    ],
}
FOR_PEERS = ["two optimizers", "one, each state with its tensor", "some amsgrad"]


def step(model: nn.Module, optimizers: Optimizers) -> None:
    model(torch.arange(7)).square().sum().backward()
    for one in optimizers:
        one.step()
        one.zero_grad()


def trained(name: str, steps: int = 3) -> tuple[nn.Module, Optimizers]:
    torch.manual_seed(0)
    model = Deep()
    optimizers = MAKERS[name](model)
    for _ in range(steps):
        step(model, optimizers)
    return model, optimizers


def another(model: nn.Module, name: str) -> tuple[nn.Module, Optimizers, OptimizerState]:
    """With the same parameters, and optimizers that have never stepped."""
    again = Deep()
    again.load_state_dict(model.state_dict())
    fresh = MAKERS[name](again)
    return again, fresh, OptimizerState(again, fresh, layout(again))


def go_on_alike(one: tuple[nn.Module, Optimizers], other: tuple[nn.Module, Optimizers]) -> bool:
    for _ in range(2):
        step(*one)
        step(*other)
    return all(torch.equal(a, b) for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True))


def leave(model: nn.Module, optimizers: Optimizers, folder: Path) -> None:
    """A state folder is left behind, without a network."""
    party = Party(folder, model=model, made=optimizers)
    party.join((0, 0))
    party.rounds.trained(10)
    party.leave()
    assert party.own.state is not None


def come_back(model: nn.Module, optimizers: Optimizers, folder: Path) -> str:
    """Whence the moments are."""
    return Party(folder, model=model, made=optimizers).join()


@pytest.mark.parametrize("name", MAKERS)
def test_a_restart_goes_on_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    """From its state folder, to the last bit; what is stacked or factored too."""
    model, optimizers = trained(name)
    leave(model, optimizers, tmp_path)
    again, fresh, _ = another(model, name)
    assert come_back(again, fresh, tmp_path) == "checkpoint"
    assert go_on_alike((model, optimizers), (again, fresh))


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_of_other_groups_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a tensor has moved from one group to another, whose states it has not; the others begin fresh too."""
    model, optimizers = trained(name)
    leave(model, optimizers, tmp_path)
    for other in MAKERS.keys() - {name}:
        again, fresh, _ = another(model, other)
        assert come_back(again, fresh, tmp_path) == "fresh"
        assert "state_refused" in capsys.readouterr().out
        step(again, fresh)


@pytest.mark.parametrize("name", MAKERS)
def test_what_peers_cannot_give_is_said_in_a_line(name: str) -> None:
    """Moments like their parameters, and numbers, are given; what is stacked or factored has only its folder."""
    with capture_logs() as log:
        state = recoverable_state(*trained(name, 0), layout(Deep()))
    assert state is not None
    assert state.for_peers is (name in FOR_PEERS)
    said = [one for one in log if one["event"] == "moments_not_for_peers"]
    assert len(said) == (name not in FOR_PEERS)
    if said:
        assert said[0]["keeps"] == state.others
        assert state.others


def test_each_moment_is_copied_for_those_tensors_only_that_keep_it() -> None:
    """So what goes to a peer, or to the disk, is no more than what there is."""
    model, optimizers = trained("two optimizers")
    state = OptimizerState(model, optimizers, layout(model))
    sizes = {name: sum(len(flats[name]) for flats in taken(state).flats) for name in state.kind.moments}
    matrices, rest = (sum(one.numel() for one in part) for part in split(model))
    assert sizes == {"exp_avg": rest, "exp_avg_sq": rest, "momentum_buffer": matrices}


def asked(ours: OptimizerState, *asking: OptimizerState) -> list[Moments | None]:
    """What each gets by way of the bus from a learner that has this state, one after another."""

    def peers(learner: str, state: OptimizerState, store: MemoryStore) -> Peers:
        bus = MemoryBus("run", VirtualClock(), store)
        return Peers(bus, VirtualClock(), learner, state.layout, state.kind, 1024, samples.run_state)

    async def donor() -> Moments:
        return taken(ours)

    async def main() -> list[Moments | None]:
        store = MemoryStore()
        await MemoryBus("run", VirtualClock(), store).write_report(samples.report("l0", step=100))
        answering = asyncio.create_task(peers("l0", ours, store).answer(lambda: 100, donor))
        found = [await peers("l1", one, store).ask() for one in asking]
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        return found

    return run_virtual(main())


@pytest.mark.parametrize("name", FOR_PEERS)
def test_they_go_on_from_a_peers_moments(name: str) -> None:
    """By way of the bus, to the last bit. One whose tensors are in other groups asks for another kind."""
    model, optimizers = trained(name)
    ours = OptimizerState(model, optimizers, layout(model))
    again, fresh, its = another(model, name)
    strangers = [another(model, other)[2] for other in FOR_PEERS if other != name]

    found, *others = asked(ours, its, *strangers)
    assert others == [None, None]
    assert found is not None
    its.load(found)
    assert go_on_alike((model, optimizers), (again, fresh))


class Odd(torch.optim.Optimizer):
    """Counts in the states of matrices alone; or keeps one thing for a first tensor, another for those after it."""

    def __init__(self, parameters: Any, what: str) -> None:
        super().__init__(parameters, {"what": what})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for at, one in enumerate(group["params"]):
                if group["what"] == "counts":
                    self.state[one] |= {"count": 1} if one.dim() == 2 else {}
                else:
                    self.state[one] |= {f"kept_{min(at, 1)}": torch.zeros_like(one)}


UNKNOWN: dict[str, Callable[[nn.Module], Optimizers]] = {
    "is in two optimizers": lambda m: [torch.optim.SGD(m.parameters(), lr=0.1), torch.optim.AdamW(m.parameters())],
    "'count' is a number for some tensors only": lambda m: [Odd(split(m)[0] + split(m)[1], "counts")],
    "keeps ['kept_0'] for one tensor, but ['kept_1'] for another": lambda m: [
        Odd(split(m)[0] + split(m)[1], "differs")
    ],
}


@pytest.mark.parametrize("said", UNKNOWN)
def test_what_cannot_be_known_is_left_alone_and_said_in_a_line(said: str) -> None:
    model = Deep()
    with capture_logs() as log:
        assert recoverable_state(model, UNKNOWN[said](model), layout(model)) is None
    (line,) = log
    assert line["event"] == "moments_not_recoverable"
    assert said in line["error"]


@pytest.mark.redis
def test_a_learner_with_two_optimizers_comes_back_with_the_moments_of_both(redis_server: str, tmp_path: Path) -> None:
    """Named when it is made, they are attached by themselves. One that it is told of later is not kept, and said so."""
    sync = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1, tokens=2**40)

    def learner(given: Optimizers, model: nn.Module) -> Learner:
        return Learner(model, given, run="both", redis_url=redis_server, learner_id="l0", sync=sync, state_dir=tmp_path)

    def train(one: Learner, model: nn.Module, optimizers: Optimizers, version: int) -> None:
        joined = one.joined  # what is saved names the run, of which a learner hears with its reports
        while min(joined.training.rounds.versions) < version or joined.shared.state is None:
            step(model, optimizers)

    with a_syncer(redis_server, "both"):
        model = Deep()
        optimizers = two(model)
        with learner(optimizers, model) as first:
            first.attach(tokens=7)
            train(first, model, optimizers, 2)
            with pytest.raises(UsageError, match="several optimizers: say which"):
                first.progress_schedule()
            first.progress_schedule(optimizers[0])
        again = Deep()
        fresh = two(again)
        with learner(fresh, again) as second:
            assert second.recovered == "checkpoint"
            for ours, its, key in zip(optimizers, fresh, ("momentum_buffer", "exp_avg_sq"), strict=True):
                mine, theirs = (list(one.state.values()) for one in (ours, its))
                assert all(torch.equal(a[key], b[key]) for a, b in zip(mine, theirs, strict=True))
            with capture_logs() as log:
                second.attach(tokens=7, optimizers=[*fresh, torch.optim.SGD(again.parameters(), lr=0.0)])
            (said,) = [one for one in log if one["event"] == "optimizers_unknown"]
            assert said["optimizers"] == ["SGD"]
    with pytest.raises(UsageError, match="pass each optimizer once"):
        learner([optimizers[0], optimizers[0]], model)
