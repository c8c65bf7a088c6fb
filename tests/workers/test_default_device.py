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
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import SYNC, a_merge

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
