"""Promises about names: wrapped in whatever trainers wrap a model in, its parameters have the plain model's names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.settings import SyncSettings
from diloco.workers.checks.frozen_digests import frozen_digests
from diloco.workers.names import named_buffers, named_parameters, state_with
from diloco.workers.parameters import tensor_table
from tests.workers.test_model_checks import process_group
from tests.workers.test_parameters import Net


def lightning(name: str, package: str = "lightning.pytorch.core.module") -> type[nn.Module]:
    """As Lightning's class is found: by its name and where it is from."""
    return type(name, (nn.Module,), {"__module__": package})


class Fabricated(nn.Module):
    """As Fabric's wrapper: the model twice, and a state dict without either name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = nn.DataParallel(model)
        self._original_module = model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._original_module.state_dict(*args, **kwargs)


def in_lightning(model: nn.Module, package: str = "lightning.pytorch.core.module") -> nn.Module:
    kind = type("Task", (lightning("LightningModule", package),), {})
    task = kind()
    task.model, task.loss = model, nn.CrossEntropyLoss()
    return task


def compiled(model: nn.Module) -> Any:
    """By a backend that compiles nothing: the wrapper is the same."""
    return torch.compile(model, backend="eager")


def with_a_part_compiled(model: nn.Module) -> nn.Module:
    model.body = compiled(model.body)
    model.head = checkpoint_wrapper(model.head)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.compile": compiled,
    "torch.compile in place": lambda model: model.compile(backend="eager") or model,
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "both": lambda model: compiled(DistributedDataParallel(model)),
    "parts": with_a_part_compiled,
    "Fabric": Fabricated,
    "Lightning": in_lightning,
    "Lightning before 2": lambda model: in_lightning(model, "pytorch_lightning.core.lightning"),
    "Lightning, compiled within, in DDP": lambda model: DistributedDataParallel(in_lightning(compiled(model))),
}


@pytest.mark.parametrize("case", WRAPPERS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_wrapped_model_has_the_layout_the_digests_and_the_state_of_the_plain_one(
    case: str, tied: bool, tmp_path: Path
) -> None:
    """So learners that wrap it in different ways are of one run, and each gives the state that the plain one takes."""
    torch.manual_seed(0)
    plain, sync = Net(tied), SyncSettings(fragments=2)
    layout, digests = layout_of(tensor_table(plain, sync)), frozen_digests(plain)
    torch.manual_seed(0)
    with process_group(tmp_path):
        wrapped = WRAPPERS[case](Net(tied))
        assert layout_of(tensor_table(wrapped, sync)) == layout
        assert frozen_digests(wrapped) == digests
        found = state_with(wrapped, {"body.bias": np.full(4, 7, np.float32), "table.weight": np.ones(28, np.float32)})
    assert found.keys() == plain.state_dict().keys()
    plain.load_state_dict(found)
    assert plain.body.bias.tolist() == [7.0] * 4
    assert bool((plain.table.weight == 1).all())
    assert tied == torch.equal(plain.head.weight, plain.table.weight)


def test_names_that_only_look_like_a_wrappers_stay() -> None:
    """A submodule that is called `module` or `model` is the model's own, as in transformers."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.module = nn.Linear(1, 1), nn.Linear(1, 1)

    assert [name.rpartition(".")[0] for name, _ in named_parameters(Own())][::2] == ["model", "module"]
    one = nn.Module()
    one.model = nn.Linear(1, 1)
    assert [name for name, _ in named_parameters(one)] == ["model.weight", "model.bias"]
    two = in_lightning(nn.Linear(1, 1))
    two.other = nn.Linear(1, 1)
    assert [name for name, _ in named_parameters(two)][:3] == ["model.weight", "model.bias", "other.weight"]
    elsewhere = in_lightning(nn.Linear(1, 1), "my.lightning")
    assert next(name for name, _ in named_parameters(elsewhere)) == "model.weight"


def test_two_parameters_of_one_name_are_refused() -> None:
    odd = nn.Module()
    odd._orig_mod, odd.weight = nn.Linear(1, 1, bias=False), nn.Parameter(torch.ones(1))
    with pytest.raises(UsageError, match="two parameters are named weight, wrappers left out"):
        list(named_parameters(odd))


def test_two_tensors_of_one_name_without_what_wraps_them_are_refused() -> None:
    """A buffer too: else it would be averaged with another tensor, or not at all."""
    task = in_lightning(Net())
    task.register_buffer("extra", torch.zeros(2))
    task.model.register_buffer("extra", torch.zeros(2))
    with pytest.raises(UsageError, match="two tensors are"):
        list(named_buffers(task))
