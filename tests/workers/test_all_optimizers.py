"""Which optimizers a learner takes, and what comes back of them: all of torch's, and stand-ins for those of others.

Of each: it trains; what is adopted stays; its state folder brings it back, and a peer's moments do, to the last bit. Or
the table says which of these it cannot, and the learner says so too.
"""

import inspect
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import SyncSettings
from diloco.workers.attached import unwrapped
from diloco.workers.learner import Learner
from diloco.workers.moments import peers as peers_module
from diloco.workers.moments.optimizer_state import OptimizerState, recoverable_state
from diloco.workers.parameters import FragmentParameters
from diloco.workers.times import LearnerTimes
from tests import HANGING_S
from tests.workers import odd_optimizers as odd
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import a_merge
from tests.workers.test_mixed_optimizers import asked, come_back, leave
from tests.workers.test_optimizer_state import layout
from tests.workers.test_trial_step import Accelerated, Managed, Sharp, patched

Make = Callable[[list[nn.Parameter]], Any]


class Sized(nn.Module):
    """Tensors of more and of less than 4,096 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(96, 64), nn.Linear(64, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).tanh())
        return out


class Large(Sized):
    """No matrix of less."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 80, bias=False)


class Matrices(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(96, 16, bias=False), nn.Linear(16, 8, bias=False)


class Words(nn.Module):
    """Its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(8, 4, sparse=True), nn.Embedding(8, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[:, :8].argmax(1)
        return torch.cat([self.table(rows), self.other(rows)], 1)


PEER, FOLDER, FRESH = "a peer or its folder", "its folder alone", "nothing: it begins fresh"
TABLE: dict[str, tuple[Make, type[nn.Module], str]] = {
    "Adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.01), Sized, FOLDER),
    "Adadelta": (torch.optim.Adadelta, Sized, PEER),
    "Adagrad": (torch.optim.Adagrad, Sized, PEER),
    "Adam": (torch.optim.Adam, Sized, PEER),
    "AdamW": (torch.optim.AdamW, Sized, PEER),
    "Adamax": (torch.optim.Adamax, Sized, PEER),
    "ASGD": (torch.optim.ASGD, Sized, PEER),
    "LBFGS": (lambda p: torch.optim.LBFGS(p, lr=0.01), Sized, FRESH),
    "Muon": (torch.optim.Muon, Matrices, PEER),
    "NAdam": (torch.optim.NAdam, Sized, PEER),
    "RAdam": (torch.optim.RAdam, Sized, PEER),
    "RMSprop": (torch.optim.RMSprop, Sized, PEER),
    "Rprop": (lambda p: torch.optim.Rprop(p, lr=1e-4), Sized, PEER),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.01), Sized, FOLDER),  # it keeps nothing: of its folder there are counters
    "SparseAdam": (torch.optim.SparseAdam, Words, FRESH),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), Sized, PEER),
    "AdamW, capturable": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False), Sized, PEER),
    "a scheduler's": (patched, Sized, PEER),
    "accelerate's": (lambda p: Accelerated(torch.optim.AdamW(p)), Sized, PEER),
    "torchft's": (lambda p: Managed(torch.optim.AdamW(p)), Sized, PEER),
    "SAM": (Sharp, Sized, FRESH),
    "torchao's 8 bits": (odd.Subclassed, Large, FRESH),
    "torchao's 8 bits, large and small": (odd.Subclassed, Sized, FRESH),
    "bitsandbytes' 8 bits": (odd.Quantized, Large, FOLDER),
    "bitsandbytes' 8 bits, large and small": (odd.Quantized, Sized, FRESH),
    "Prodigy": (odd.Estimating, Sized, FRESH),
    "Shampoo": (odd.Shampoo, Sized, FOLDER),
    "SOAP": (odd.Soap, Sized, FRESH),
    "a decay of its own": (odd.Decaying, Sized, PEER),
    "fp32 masters": (odd.Masters, Sized, PEER),
    "schedule-free": (odd.ScheduleFree, Sized, FRESH),
    "Lookahead": (lambda p: odd.Lookahead(torch.optim.SGD(p, lr=0.01)), Sized, FRESH),
}
RATES = {"a scheduler's": 0.01, "SAM": 0.01}
"""Of those stand-ins' own."""
UNDO = {"fp32 masters", "schedule-free", "Lookahead"}
"""These go on from a copy of the weights."""


def made(name: str) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """A model, its optimizer, and what the learner takes of that; the same each time."""
    torch.manual_seed(0)
    make, kind, _ = TABLE[name]
    model = kind()
    optimizer = make(list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * RATES.get(name, 1.0)
    if hasattr(optimizer, "train"):
        optimizer.train()
    (inner,) = unwrapped(model, optimizer)
    return model, optimizer, inner


def trained(name: str, steps: int = 6) -> tuple[nn.Module, Any, torch.optim.Optimizer, list[float]]:
    model, optimizer, inner = made(name)
    return model, optimizer, inner, train(model, optimizer, steps)


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    x, losses = torch.randn(16, 96, generator=torch.Generator().manual_seed(1)), list[float]()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(closure().item())
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            optimizer.step()
    return losses


def test_the_table_has_all_that_torch_has() -> None:
    kinds = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind)} - {"Optimizer"}
    assert kinds <= TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_each_trains_and_keeps_what_it_adopts_or_is_refused_by_name(name: str) -> None:
    """Beside a twin with the same gradients and no adoption. Of Lookahead and schedule-free some is there for long."""
    (model, optimizer, inner, losses), (other, plain, _, _) = trained(name), trained(name)
    assert losses[-1] < losses[0]
    parameters, whole = FragmentParameters(model, layout(model)), layout(model).fragments[0]
    old = torch.from_numpy(parameters.snapshot(0).numpy())
    noise = torch.randn(whole.elements)
    parameters.overwrite(0, (old + noise).numpy())
    for seed in range(20):
        for one, twin in zip(model.parameters(), other.parameters(), strict=True):
            generator = torch.Generator().manual_seed(seed)
            one.grad = twin.grad = 1e-3 * torch.randn(one.shape, generator=generator)
            if name == "SparseAdam":
                one.grad = twin.grad = one.grad.to_sparse(1)
        for each in (optimizer, plain):
            each.step(*[lambda: 1.0] * isinstance(each, torch.optim.LBFGS))
    there = FragmentParameters(model, layout(model)).snapshot(0).numpy()
    without = FragmentParameters(other, layout(other)).snapshot(0).numpy()
    kept = float((torch.from_numpy(there - without) * noise).sum() / noise.square().sum())
    if name in UNDO:
        assert kept < 0.8
        with pytest.raises(UsageError, match=rf"\({type(inner).__name__}\) continues from its own copy.*adopted=fn"):
            Learner(model, optimizer, redis_url="redis://localhost")
    else:
        assert kept > (0.6 if "decay" in name else 0.99)
        Learner(model, optimizer, redis_url="redis://localhost")


def log_of(events: set[str], log: list[Any]) -> set[str]:
    return events & {line["event"] for line in log}


@pytest.mark.parametrize("name", TABLE)
def test_each_comes_back_from_its_folder_to_the_last_bit_or_fresh_and_says_so(name: str, tmp_path: Path) -> None:
    expected = TABLE[name][2]
    with capture_logs() as log:
        model, optimizer, inner, _ = trained(name)
        leave_or_not(model, inner, tmp_path)
        again, fresh, its = made(name)
        again.load_state_dict(model.state_dict())
        source = come_back(again, [its], tmp_path)
    said = log_of({"moments_not_recoverable", "state_not_saved"}, log)
    told = {"state_not_saved" if name == "bitsandbytes' 8 bits, large and small" else "moments_not_recoverable"}
    assert (source, said) == (("fresh", told) if expected == FRESH else ("checkpoint", set()))
    losses = train(again, fresh, 3)
    if expected != FRESH:
        assert losses == train(model, optimizer, 3)
        assert all(map(torch.equal, model.parameters(), again.parameters()))


def leave_or_not(model: nn.Module, inner: torch.optim.Optimizer, folder: Path) -> None:
    if recoverable_state(model, [inner], layout(model)) is not None:
        leave(model, [inner], folder)


@pytest.mark.parametrize("name", [name for name, (_, _, expected) in TABLE.items() if expected == PEER])
def test_these_go_on_from_a_peers_moments_to_the_last_bit(name: str) -> None:
    model, optimizer, inner, _ = trained(name)
    again, fresh, its = made(name)
    again.load_state_dict(model.state_dict())
    ours, new = (OptimizerState(one, kept, layout(one)) for one, kept in ((model, inner), (again, its)))
    assert ours.for_peers
    (found,) = asked(ours, new)
    assert found is not None
    new.load(found)
    assert train(model, optimizer, 3) == train(again, fresh, 3)


PAGE = Path(__file__).parents[2] / "docs/howto/own-loop.md"


def left_of_noise(name: str, dtype: torch.dtype, key: str) -> float:
    """How much of a change of the parameters is there after 20 steps. key: of the copy that follows; "": none does."""
    found = []
    for change in (0.0, 1.0):
        model, optimizer, inner, _ = trained(name)
        model.to(dtype)
        follow = odd.adopted_of(PAGE, key, inner) if key else None
        parameters = FragmentParameters(model, layout(model), follow)
        for p, fragment in enumerate(layout(model).fragments):
            noise = torch.randn(fragment.elements, generator=torch.Generator().manual_seed(p))
            parameters.overwrite(p, (torch.from_numpy(parameters.snapshot(p).numpy()) + change * noise).numpy())
        for seed in range(20):
            for one in model.parameters():
                gradient = torch.randn(one.shape, generator=torch.Generator().manual_seed(seed))
                one.grad = (1e-3 * gradient).to(dtype)
            optimizer.step()
        found.append(torch.from_numpy(parameters.snapshot(p).numpy()))
    return float(((found[1] - found[0]) * noise).sum() / noise.square().sum())


@pytest.mark.parametrize(
    ("name", "dtype", "key"),
    [
        ("fp32 masters", torch.float32, "master"),
        ("fp32 masters", torch.bfloat16, "master"),
        ("schedule-free", torch.float32, "z"),
    ],
)
def test_one_that_goes_on_from_a_copy_keeps_what_it_adopts_once_the_copy_follows(
    name: str, dtype: torch.dtype, key: str
) -> None:
    """As the page has it."""
    assert left_of_noise(name, dtype, "") < 0.8
    assert left_of_noise(name, dtype, key) > 0.98
    model, optimizer, inner = made(name)
    Learner(model, optimizer, redis_url="redis://localhost", adopted=odd.adopted_of(PAGE, key, inner))


def test_a_master_keeps_what_its_parameter_rounds_away_unless_that_was_adopted() -> None:
    model, _, inner, _ = trained("fp32 masters")
    model.to(torch.bfloat16)
    one = next(model.parameters())
    before, master = one.detach().clone(), inner.state[one]["master"]
    was = master.clone()
    with torch.no_grad():
        one[0] += 1
        odd.adopted_of(PAGE, "master", inner)(one, before)
    assert torch.equal(master[1:], was[1:])
    assert torch.equal(master[0], one[0].float())


def test_one_that_is_attached_to_later_is_tried_then() -> None:
    """Its learner was made without it; what it does not know it cannot try."""
    model, optimizer, _ = made("fp32 masters")
    learner = Learner(model, redis_url="redis://localhost")
    with pytest.raises(UsageError, match="Masters"):
        learner._check_adoptions([optimizer])
    with pytest.raises(UsageError, match="adopted"):
        Learner(model, redis_url="redis://localhost", adopted=3)  # type: ignore[arg-type]


def test_one_that_cannot_be_tried_is_taken_and_said() -> None:
    model, optimizer, _ = made("SAM")
    with capture_logs() as log:
        Learner(model, optimizer, redis_url="redis://localhost")
    (said,) = log
    assert (said["event"], said["optimizer"]) == ("adoption_not_tried", "Sharp")
    assert "holds a AdamW" in said["error"]
    assert "adopted=" in said["detail"]


@pytest.mark.redis
def test_a_loop_hears_of_each_parameter_that_is_adopted_and_what_it_was_before(redis_server: str) -> None:
    """On joining, in a step, and once more with the finished run's values; no buffer is among them."""
    heard = list[tuple[Any, torch.Tensor, bool]]()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def adopted(parameter: Any, before: torch.Tensor) -> None:
        heard.append((parameter, before, torch.is_grad_enabled()))

    def all_of_them() -> bool:
        mine, grads = {id(one) for one, _, _ in heard}, {grad for _, _, grad in heard}
        heard.clear()
        return mine == set(map(id, model.parameters())) and grads == {False}

    optimizer = torch.optim.AdamW(model.parameters())
    sync = SyncSettings(fragments=2, sync_interval=4, first_interval=0, quorum=1, tokens=2**40)
    how: Any = {"run": "heard", "redis_url": redis_server, "sync": sync, "adopted": adopted}
    with a_syncer(redis_server, "heard"), Learner(model, optimizer, **how) as learner:
        assert all_of_them()
        a_merge(learner)
        while min(learner.joined.training.rounds.versions) < 1:
            learner.step(1)
        assert all_of_them()
        with torch.no_grad():
            values = [one.clone() for one in model.parameters()]
            for one in model.parameters():
                one += 1
        learner.close()
        learner.load_globals()
        assert all(torch.equal(before, one + 1) for (_, before, _), one in zip(heard, values, strict=True))
        assert all_of_them()


@pytest.mark.slow
@pytest.mark.redis
def test_a_newcomer_ends_no_learner_whose_moments_cannot_be_copied(
    redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its real states are of a class that its trial has not seen; nor does its own folder end it. Both train on."""
    monkeypatch.setattr(peers_module, "TIMES", LearnerTimes(moments_unclaimed_s=1.0, moments_claim_ttl_s=1.0))
    sync = SyncSettings(fragments=2, sync_interval=4, first_interval=0, quorum=1, tokens=2**40)

    def learner(name: str, **more: Any) -> Learner:
        torch.manual_seed(0)
        model = Sized()
        optimizer = odd.Subclassed(list(model.parameters()), even=2048)
        return Learner(model, optimizer, run="odd", redis_url=redis_server, learner_id=name, sync=sync, **more)

    def steps(one: Learner, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANGING_S
        while not enough():
            assert time.monotonic() < deadline
            train(one.model, one.optimizer, 1)
            one.step(1)
            time.sleep(0.01)

    first, found = learner("l0", state_dir=tmp_path, state_every_s=0.2), list[str]()

    def join() -> None:
        with learner("l1") as second:
            steps(second, lambda: second.joined.training.rounds.steps > 5)
            found.append(second.recovered)

    joining = threading.Thread(target=join)
    with a_syncer(redis_server, "odd"), capture_logs() as log, first:
        rounds = first.joined.training.rounds
        steps(first, lambda: min(rounds.versions) > 0 and rounds.steps > 60)
        joining.start()
        steps(first, lambda: not joining.is_alive())
        joining.join()
    assert found == ["fresh"]
    assert [line["learner"] for line in log if line["event"] == "moments_not_copied"] == ["l0"]
    assert not (tmp_path / "state.json").exists()
