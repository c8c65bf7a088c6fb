"""Promises about which models and optimizers a learner takes. Refusals come when it is made, before it is connected."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import SyncSettings
from diloco.workers.checks.model_checks import check_optimizer
from diloco.workers.learner import Learner
from tests.workers.test_parameters import Net
from tests.workers.test_trial_step import Accelerated


def learner(model: Any, optimizer: Any = None, **given: Any) -> Learner:
    return Learner(model, optimizer, redis_url="redis://localhost", **given)


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """One rank in this process."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def test_ranks_that_nobody_says_are_one_learner_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain model beside a process group of several ranks, also where the group came after the learner was made."""
    early = learner(nn.Linear(2, 2))
    with process_group(tmp_path):
        monkeypatch.setattr(distributed, "get_world_size", lambda *_: 2)
        with pytest.raises(UsageError, match=r"has 2 ranks, and the model is neither .* nor sharded.*pass mesh="):
            learner(nn.Linear(2, 2))
        with pytest.raises(UsageError, match="has 2 ranks"):
            early.open()


def test_one_rank_alone_is_taken(tmp_path: Path) -> None:
    """Wrapped or not."""
    with process_group(tmp_path):
        learner(DistributedDataParallel(nn.Linear(2, 2)))
        learner(nn.DataParallel(nn.Linear(2, 2)))


def test_ranks_are_found_by_the_model_or_the_mesh(tmp_path: Path) -> None:
    """FSDP2 and tensor parallelism are taken; shards of a third dimension, partial sums and what is plain beside
    FSDP2's shards are refused by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group(tmp_path):
        mesh = init_device_mesh("cpu", (1,))
        assert learner(nn.Linear(2, 2), mesh=mesh)._ranks == ()
        assert learner(nn.Linear(2, 2), mesh=distributed.group.WORLD)._ranks == ()
        assert learner(fully_shard(nn.Linear(2, 2), mesh=mesh))._ranks == (0,)
        with pytest.raises(UsageError, match="mesh is a str: pass a DeviceMesh or a process group"):
            learner(nn.Linear(2, 2), mesh="all")
        assert learner(nn.Linear(2, 2), mesh="world")._ranks == ()
        parallel = nn.Linear(2, 2)
        parallel.weight = nn.Parameter(distribute_tensor(parallel.weight.detach(), mesh, [Shard(1)]))
        assert learner(parallel)._ranks == (0,)
        columns = fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda one: Shard(one.dim() - 1))
        assert learner(columns)._ranks == (0,)
        deep = nn.Conv1d(2, 2, 1)
        for placement in (Shard(2), Partial()):
            deep.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2, 1), mesh, [placement]))
            with pytest.raises(UsageError, match=r"parameter weight is placed as .*shards of rows or columns"):
                learner(deep)
        mixed = nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh), nn.Linear(2, 2))
        with pytest.raises(UsageError, match=r"parameter 1.weight is trained but, unlike others, not sharded"):
            learner(mixed)
    with pytest.raises(UsageError, match="mesh= without a process group"):
        learner(nn.Linear(2, 2), mesh=mesh)


def test_a_model_of_fsdp1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants an accelerator, so only its class is here."""
    from torch.distributed import fsdp

    class Wrapper(nn.Sequential):
        pass

    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", Wrapper)
    with pytest.raises(UsageError, match="module 1 is wrapped in FullyShardedDataParallel"):
        learner(nn.Sequential(nn.Linear(2, 2), Wrapper(nn.Linear(2, 2))))


class Wrapped(torch.Tensor):
    """Holds its values in another tensor, as quantized weights of torchao do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


def parameter(tensor: torch.Tensor, **given: Any) -> nn.Module:
    module = nn.Module()
    module.p = nn.Parameter(tensor, **given)
    return module


def partitioned() -> nn.Module:
    module = parameter(torch.empty(0))
    module.p.ds_id = 0
    return module


def two_devices() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, device="meta")})


def tied_by_data() -> nn.Module:
    net = Net()
    net.head.weight.data = net.table.weight.data
    return net


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: [nn.Linear(2, 2)], "model is a list"),
    "no parameters": (nn.ReLU, "none of the model's parameters requires a gradient"),
    "all frozen": (lambda: nn.Linear(2, 2).requires_grad_(False), r"requires a gradient.*call requires_grad_\(True\)"),
    "empty": (lambda: parameter(torch.ones(0)), "parameters that require a gradient have no elements"),
    "lazy": (lambda: nn.LazyLinear(2), "parameter weight has no shape yet"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "parameter weight is on the meta device"),
    "two devices": (two_devices, "parameter b.weight is on the meta device"),
    "sparse": (lambda: parameter(torch.eye(3).to_sparse()), "parameter p is sparse"),
    "complex": (lambda: parameter(torch.ones(2, dtype=torch.complex64)), "parameter p is torch.complex64"),
    "expanded": (lambda: parameter(torch.ones(1).expand(4)), "parameter p is expanded"),
    "wrapper": (lambda: parameter(Wrapped(torch.ones(2))), "parameter p is a Wrapped"),
    "zero-3": (partitioned, "parameter p is partitioned by DeepSpeed"),
    "tied by data": (
        tied_by_data,
        r"parameters table.weight and head.weight share memory|head.weight and table.weight",
    ),
    "long name": (
        lambda: nn.ModuleDict({"n" * 513: nn.Linear(2, 2)}),
        "has a name of 520 characters, but at most 512 are allowed",
    ),
    "many dimensions": (lambda: parameter(torch.ones((1,) * 17)), "parameter p has 17 dimensions, but at most 16 are"),
    "frozen meta": (
        lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, device="meta").requires_grad_(False)}),
        "frozen parameter b.weight has no values here.*same_frozen=False",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_would_go_wrong_is_refused_by_name(case: str) -> None:
    make, said = REFUSED[case]
    with pytest.raises(UsageError, match=said):
        learner(make())


def test_more_fragments_than_tensors_are_refused_when_they_are_asked_for() -> None:
    with pytest.raises(UsageError, match="fragments=5, but the model has 4 trained tensors"):
        learner(Net(), sync=SyncSettings(fragments=5))


def test_trained_parameters_on_two_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a meta device in place of a second real one."""
    monkeypatch.setattr("diloco.workers.checks.model_checks._check_tensor", lambda *_: None)
    with pytest.raises(UsageError, match=r"several devices: a\.weight on cpu, b\.weight on meta"):
        learner(two_devices())


def test_what_is_frozen_may_be_anything() -> None:
    """Quantized, sparse, of another type, elsewhere if it is not compared; and a learner is where its training is."""
    model = Net()
    model.sparse = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
    model.wrapped = nn.Parameter(Wrapped(torch.ones(2)), requires_grad=False)
    model.one = model.two = nn.Linear(3, 3)
    learner(model)
    before = nn.Sequential(nn.Linear(2, 2, device="meta").requires_grad_(False), nn.Linear(2, 2))
    assert learner(before, same_frozen=False).device == torch.device("cpu")


def test_parts_of_one_memory_are_taken() -> None:
    """As the weights of a fused layer, side by side or interleaved: no element is in two of them."""
    memory = torch.zeros(4, 6)
    model = nn.ParameterList([memory[:2], memory[2:, :3], memory[2:, 3:]])
    learner(model)


# --- optimizers -------------------------------------------------------------------------------------


class Duck:
    def __init__(self, optimizer: Any) -> None:
        self.optim = optimizer


class Own(torch.optim.SGD):
    """Wraps another, with a state of its own beside it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, lr=0.1)
        self.optimizer = optimizer


def test_the_optimizer_that_keeps_the_moments_is_found() -> None:
    model = Net()
    adam = torch.optim.AdamW(model.parameters())
    for wrapper in (adam, Accelerated(adam), Duck(adam), Duck(Accelerated(adam))):
        assert check_optimizer(model, wrapper) is adam
    own = Own(adam)
    assert check_optimizer(model, own) is own
    assert check_optimizer(model, None) is None


def test_a_circle_of_wrappers_ends() -> None:
    duck = Duck(None)
    duck.optim = duck
    duck.param_groups = []  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="optimizer is a Duck"):
        learner(Net(), duck)


def test_an_empty_list_of_optimizers_is_said_to_be_empty() -> None:
    with pytest.raises(UsageError, match="the list of optimizers is empty"):
        learner(Net(), [])


@pytest.mark.parametrize("optimizer", ["AdamW", torch.optim.AdamW, Duck("AdamW")], ids=["name", "class", "duck"])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    with pytest.raises(UsageError, match=r"optimizer is a .*torch.optim.Optimizer.*or None"):
        learner(Net(), optimizer)


def test_an_optimizer_of_another_model_is_refused() -> None:
    """Of a copy, or of what is frozen: it would train nothing that travels. Some of the parameters are enough."""
    model = Net()
    for others in (copy.deepcopy(model).parameters(), [model.frozen]):
        with pytest.raises(UsageError, match="holds none of the model's trained parameters"):
            learner(model, torch.optim.AdamW(others))
    learner(model, torch.optim.AdamW([model.head.weight]))
