"""The built-in trainer's ranks: processes that train one model together, as torch's launcher has started them.

The batch is the learner's: each rank trains its share of every micro-batch, so a learner of any number of ranks makes
the same steps. Rank 0 reads the run's work queue and tells the others which blocks come next.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload import codec
from diloco.pipeline.settings import LearnerProcess, LearnerSettings
from diloco.workers.ranks.topology import WORLD
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.precision import checkpoint_activations, training_forward
from diloco.workers.trainer.recipe import choose_device, forward_of, read_batch

AT_WORK = "DILOCO_RANKS_AT_WORK"
"""Variable: a folder of the process that has started the ranks, with a file for each that trains (`mark`)."""
Order = Iterator[tuple[int, int]]
"""(epoch, index) of blocks."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Those of this process's learner."""

    number: int = 0
    """This process's."""
    count: int = 1
    local: int = 0
    """This process's among those of this machine."""
    here: int = 1
    """Those of this machine."""


def ranks_here() -> Ranks:
    """As torch's launcher says in the environment; without it, one."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    if any(name not in os.environ for name in names) or os.environ["WORLD_SIZE"] == "1":
        return Ranks()
    return Ranks(*(int(os.environ[name]) for name in names))


def rank_device(ranks: Ranks, asked: str) -> torch.device:
    """That of this rank. asked: as the setting `device`: one for each rank of this machine, or where all look for one.

    Raises:
        UsageError: as `choose_device`, or there are not as many as ranks.
    """
    each = asked.split("+")
    if ranks.count == 1:
        return choose_device(asked)
    if len(each) == 1 and asked not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device={asked!r} is one device, and {ranks.here} ranks of this learner are here: name all")
    if len(each) not in (1, ranks.here):
        raise UsageError(f"device={asked!r} has {len(each)} devices for {ranks.here} ranks on this machine")
    device = choose_device(each[ranks.local] if len(each) > 1 else asked)
    if device.type == "cuda":
        device = choose_device(str(device) if device.index is not None else f"cuda:{ranks.local}")
        torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """That of all ranks, where there are several: NCCL between GPUs, gloo for what is in host memory."""
    if ranks.count == 1:
        yield
        return
    # A learner notes SIGTERM, and ends with its other ranks at the same step.
    signal.signal(signal.SIGINT, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    yield
    distributed.destroy_process_group()  # not after an error: it would wait for a rank that is gone


def mark(ranks: Ranks, at_work: bool) -> None:
    """Tell the process that has started this rank: what trains has something to lose, until it has left in order."""
    if ranks.count > 1 and AT_WORK in os.environ:
        path = Path(os.environ[AT_WORK], f"rank {ranks.number}")
        path.touch() if at_work else path.unlink(missing_ok=True)


def agree_on_spec(ranks: Ranks, read: Callable[[], Spec | None]) -> Spec | None:
    """What rank 0 has read, on all."""
    if ranks.count == 1:
        return read()
    encoded = b""
    if ranks.number == 0 and (spec := read()) is not None:
        encoded = codec.encode(spec)
    size = torch.tensor([len(encoded)], device="cpu")
    distributed.broadcast(size, 0)
    if not int(size):
        return None
    told = torch.frombuffer(bytearray(encoded or int(size)), dtype=torch.uint8)
    distributed.broadcast(told, 0)
    return codec.decode(Spec, told.numpy().tobytes())


class Prepared(NamedTuple):
    """A model, ready to be trained."""

    model: nn.Module
    """What a learner is made of, and its optimizer."""
    forward: nn.Module
    """Called with a batch; gradients arrive in the model's parameters."""
    begin: Callable[[bool], None] = lambda last: None
    """Called before each micro-batch of a step: whether it is the last."""
    end: Callable[[], None] = lambda: None
    """Called once all of a step's gradients are there."""
    mesh: str | None = None
    """As `Learner`'s."""


def prepare(model: nn.Module, device: torch.device, settings: LearnerSettings, ranks: Ranks) -> Prepared:
    """One rank's of a model that all ranks have made alike.

    Raises:
        UsageError: as `training_forward`.
    """
    if ranks.count == 1:
        model = model.to(device)
        return Prepared(model, training_forward(model, device, settings))
    if settings.sharding == "fsdp":
        return _sharded(model, device, settings, ranks)
    model = model.to(device)
    if settings.precision == "bf16":  # gradients are added to the masters in float32, which DDP does not see
        return Prepared(model, training_forward(model, device, settings), end=_Mean(model, ranks), mesh=WORLD)
    if settings.checkpoint_activations:
        checkpoint_activations(model)
    together = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def begin(last: bool) -> None:
        together.require_backward_grad_sync = last

    return Prepared(together, forward_of(together, device, settings.compile), begin)


class _Mean:
    """Makes each gradient its mean over all ranks; that of a parameter which a rank did not use is zero there."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._parameters, self._ranks = [p for p in model.parameters() if p.requires_grad], ranks

    def __call__(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        torch._foreach_div_(gradients, self._ranks.count)
        for work in [distributed.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()


def _sharded(model: nn.Module, device: torch.device, settings: LearnerSettings, ranks: Ranks) -> Prepared:
    """By `fully_shard`, block by block; each block goes to the device as it is cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if settings.checkpoint_activations:
        checkpoint_activations(model)
    mesh = init_device_mesh(device.type, (ranks.count,))
    in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = in_bf16 if settings.precision == "bf16" else MixedPrecisionPolicy()
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Prepared(model, model)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Its layers: what lies in lists of modules, but for lists within those."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return found


class Rows:
    """The blocks of each step: rank 0 reads their order, and each rank the blocks of its share."""

    def __init__(self, blocks: Blocks, order: Order | None, settings: LearnerProcess, ranks: Ranks) -> None:
        """order: rank 0's."""
        self._blocks, self._order, self._ranks = blocks, order, ranks
        self._batch, self._accumulate = settings.batch, settings.accumulate

    def step(self, device: torch.device) -> Iterator[torch.Tensor]:
        """This rank's micro-batches of the next step, (batch / ranks, T + 1) int64 each."""
        if self._ranks.count == 1:
            for _ in range(self._accumulate):
                yield read_batch(self._blocks, self._own_order, self._batch, device)
            return
        share = self._batch // self._ranks.count
        for micro in self._told().view(self._accumulate, self._ranks.count, share, 2)[:, self._ranks.number]:
            yield read_batch(self._blocks, iter(micro.tolist()), share, device)

    @property
    def _own_order(self) -> Order:
        assert self._order is not None  # noqa: S101  # rank 0's, or the only process's
        return self._order

    def _told(self) -> torch.Tensor:
        """(epoch, index) of all blocks of a step, on all ranks: (accumulate x batch, 2)."""
        size = self._accumulate * self._batch
        if self._ranks.number == 0:
            told = torch.from_numpy(np.array(list(islice(self._own_order, size)), np.int64))
        else:
            told = torch.empty(size, 2, dtype=torch.int64, device="cpu")
        distributed.broadcast(told, 0)
        return told
