"""Promises about `torch.set_default_device`: whatever it is, what the library makes lies where it belongs.

Here the default device is "meta", whose tensors have no values, so that whatever is made there cannot be used at all.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

import diloco
from diloco.workers.learner import Learner
from diloco.workers.moments.optimizer_state import OptimizerState
from diloco.workers.names import state_with
from diloco.workers.parameters import FragmentParameters
from diloco.workers.trainer.models.gpt import build
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import SYNC, a_merge
from tests.workers.test_optimizer_state import MAKERS, layout, taken, trained
from tests.workers.test_parameters import Net
from tests.workers.test_recovery import Party, left, same

ROOT = Path(diloco.__file__).parents[1]
MAKE = {f"torch.{made.__name__}" for made in _device_constructors()} | {"torch.Generator"}


@pytest.fixture
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def unnamed(source: str) -> list[str]:
    """Calls that make a tensor where the default device is."""
    calls = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Call)]
    made = [one for one in calls if ast.unparse(one.func) in MAKE and "device" not in {k.arg for k in one.keywords}]
    return [f"{one.lineno}: {ast.unparse(one)}" for one in made]


def test_every_tensor_that_the_product_makes_names_its_device() -> None:
    assert unnamed("x = torch.zeros(3)\ny = torch.zeros(3, device=x.device)") == ["1: torch.zeros(3)"]
    files = [one for part in ("workers", "diloco", "pipeline", "syncer") for one in (ROOT / part).glob("**/*.py")]
    found = {str(one.relative_to(ROOT)): unnamed(one.read_text()) for one in files}
    assert len(files) > 200
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_a_restart_finds_its_state_folder(tmp_path: Path, elsewhere: None) -> None:
    """And its random numbers, which torch takes from host memory alone."""
    with torch.device("cpu"):
        first, again = left(tmp_path), Party(tmp_path)
    assert again.join() == "checkpoint"
    assert same(again.moments(), first.moments())


@pytest.mark.parametrize("name", MAKERS)
def test_moments_are_copied_and_put_back(name: str, elsewhere: None) -> None:
    with torch.device("cpu"):
        model, optimizer = trained(MAKERS[name])
        fresh = MAKERS[name]([one for one in model.parameters() if one.requires_grad])
        old, new = (OptimizerState(model, one, layout(model)) for one in (optimizer, fresh))  # torch's own steps
    new.load(taken(old))
    assert {one.device.type for kept in fresh.state.values() for one in kept.values()} == {"cpu"}


def test_global_values_are_in_host_memory(elsewhere: None) -> None:
    with torch.device("cpu"):
        model = Net()
    parameters = FragmentParameters(model, layout(model))
    values = layout(model).whole([parameters.snapshot(p).numpy() for p in range(2)])
    assert {one.device.type for one in state_with(model, values).values()} == {"cpu"}
    assert next(build("tiny", seed=0).parameters()).device.type == "cpu"


@pytest.mark.redis
def test_a_learner_joins_trains_and_comes_back(redis_server: str, tmp_path: Path, elsewhere: None) -> None:
    def learner() -> Learner:
        model = nn.Linear(4, 4, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        how = {"run": "elsewhere", "learner_id": "l0", "redis_url": redis_server, "sync": SYNC, "state_dir": tmp_path}
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        return Learner(model, optimizer, **how)  # type: ignore[arg-type]

    with a_syncer(redis_server, "elsewhere"):
        with learner() as first:
            first.optimizer.step()  # type: ignore[union-attr]
            a_merge(first)
            assert {one.device.type for one in first.globals().values()} == {"cpu"}
        first.load_globals()
        with learner() as second:
            assert second.recovered == "checkpoint"
