"""The built-in trainer's ranks: processes that torch's launcher has started and that train one model together.

The batch is the learner's: each rank trains its share of every micro-batch, so a learner makes the same steps with any
number of ranks. Rank 0 reads the run's work queue and tells the others which blocks come next.
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

# Name of an environment variable: it holds a folder, made by the process that started the ranks, in which every rank
# that trains has a file (`mark`).
AT_WORK = "DILOCO_RANKS_AT_WORK"
# (epoch, index) of blocks.
Order = Iterator[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of this process's learner."""

    number: int = 0
    """This process's rank."""
    count: int = 1
    local: int = 0
    """This process's number among the ranks of this machine."""
    here: int = 1
    """Number of ranks on this machine."""


def ranks_here() -> Ranks:
    """Return the ranks that torch's launcher describes in the environment; a single one without the launcher."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    if any(name not in os.environ for name in names) or os.environ["WORLD_SIZE"] == "1":
        return Ranks()
    return Ranks(*(int(os.environ[name]) for name in names))


def rank_device(ranks: Ranks, asked: str) -> torch.device:
    """Return this rank's device.

    Args:
        ranks: the learner's ranks.
        asked: the setting `device`: one device for each rank of this machine, or a kind of which each rank takes one.

    Raises:
        UsageError: raised by `choose_device`, or there are not as many devices as ranks.
    """
    each = asked.split("+")
    if ranks.count == 1:
        return choose_device(asked)
    if len(each) == 1 and asked not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"device={asked!r} is one device, but this learner has {ranks.here} ranks on this machine: "
            "give one for each rank"
        )
    if len(each) not in (1, ranks.here):
        raise UsageError(
            f"device={asked!r} has {len(each)} devices, but this learner has {ranks.here} ranks on this machine"
        )
    device = choose_device(each[ranks.local] if len(each) > 1 else asked)
    if device.type == "cuda":
        device = choose_device(str(device) if device.index is not None else f"cuda:{ranks.local}")
        torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Open the process group of all ranks, if there are several: NCCL between GPUs, gloo for host memory."""
    if ranks.count == 1:
        yield
        return
    # Turn Ctrl-C into SIGTERM, which the learner notes: it then ends at the same step as its other ranks.
    signal.signal(signal.SIGINT, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    yield
    distributed.destroy_process_group()  # not after an error: it would wait for a dead rank


def mark(ranks: Ranks, at_work: bool) -> None:
    """Record, for the process that started the ranks, that this rank is training and has something to lose, or not."""
    if ranks.count > 1 and AT_WORK in os.environ:
        path = Path(os.environ[AT_WORK], f"rank {ranks.number}")
        path.touch() if at_work else path.unlink(missing_ok=True)


def agree_on_spec(ranks: Ranks, read: Callable[[], Spec | None]) -> Spec | None:
    """Return on all ranks the spec that rank 0 has read."""
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
    """A model that is ready for training."""

    model: nn.Module
    """The model for the learner and the optimizers."""
    forward: nn.Module
    """The module to call with a batch; gradients arrive in the model's parameters."""
    begin: Callable[[bool], None] = lambda last: None
    """Called before each micro-batch of a step, with True if it is the last one."""
    end: Callable[[], None] = lambda: None
    """Called when all of a step's gradients are complete."""
    mesh: str | None = None
    """The `mesh` argument for `Learner`."""


def prepare(model: nn.Module, device: torch.device, settings: LearnerSettings, ranks: Ranks) -> Prepared:
    """Prepare this rank's copy of a model, which all ranks have built alike, for training.

    Raises:
        UsageError: raised by `training_forward`.
    """
    if ranks.count == 1:
        model = model.to(device)
        return Prepared(model, training_forward(model, device, settings))
    if settings.sharding == "fsdp":
        return _sharded(model, device, settings, ranks)
    model = model.to(device)
    if settings.precision == "bf16":  # DDP does not see gradients that hooks add to masters
        return Prepared(model, training_forward(model, device, settings), end=_Mean(model, ranks), mesh=WORLD)
    if settings.checkpoint_activations:
        checkpoint_activations(model)
    together = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def begin(last: bool) -> None:
        together.require_backward_grad_sync = last

    return Prepared(together, forward_of(together, device, settings.compile), begin)


class _Mean:
    """Averages each gradient over all ranks. A rank that did not use a parameter contributes a zero gradient for it."""

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
    """Shard the model by `fully_shard`, block by block; each block moves to the device when it is sharded."""
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
    """Return the model's layers: the children of its module lists, without descending into those."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return found


class Rows:
    """The blocks of each step: rank 0 reads their order, and each rank reads the blocks of its share."""

    def __init__(self, blocks: Blocks, order: Order | None, settings: LearnerProcess, ranks: Ranks) -> None:
        """order: (epoch, index) of the blocks to train on; given only at rank 0."""
        self._blocks, self._order, self._ranks = blocks, order, ranks
        self._batch, self._accumulate = settings.batch, settings.accumulate

    def step(self, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield this rank's micro-batches of the next step, (batch / ranks, T + 1) int64 each."""
        if self._ranks.count == 1:
            for _ in range(self._accumulate):
                yield read_batch(self._blocks, self._own_order, self._batch, device)
            return
        share = self._batch // self._ranks.count
        for micro in self._told().view(self._accumulate, self._ranks.count, share, 2)[:, self._ranks.number]:
            yield read_batch(self._blocks, iter(micro.tolist()), share, device)

    @property
    def _own_order(self) -> Order:
        assert self._order is not None  # noqa: S101  # only rank 0, or the only process, gets here
        return self._order

    def _told(self) -> torch.Tensor:
        """Return on all ranks the (epoch, index) of all blocks of a step, (accumulate x batch, 2)."""
        size = self._accumulate * self._batch
        if self._ranks.number == 0:
            told = torch.from_numpy(np.array(list(islice(self._own_order, size)), np.int64))
        else:
            told = torch.empty(size, 2, dtype=torch.int64, device="cpu")
        distributed.broadcast(told, 0)
        return told
