"""Finds the ranks that form one learner and lets them meet. For the training thread. Only this module knows DTensors.

| model | ranks of the learner |
|---|---|
| plain, in one process | none: the process is a learner on its own |
| in DistributedDataParallel | the ranks of its process group |
| of DTensors: `fully_shard` (FSDP2, HSDP), tensor parallelism, or both | the ranks of their largest mesh |
| plain, with a mesh or a process group passed | the ranks of that; the loop averages gradients itself |

Every other setup that spans several processes is refused, and the error gives the reason.

The messages that ranks exchange when they meet travel over their gloo group and are never pickles, which torch's own
object collectives would be. Every message has bounds (`Message`) and is preceded by its size. All ranks read the same
bytes, so either all accept a message or all refuse it.
"""

import atexit
import ctypes
import gc
import math
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import structlog
import torch
from pydantic import Field
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.pipeline.agreement import differences
from diloco.pipeline.errors import BadMessage, DilocoError, RankGone, UsageError
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import MAX_TENSORS, Message, Nonce, PartyId, Text
from diloco.pipeline.payload import codec
from diloco.workers.averaged import averaged_buffers
from diloco.workers.encoding import Float32
from diloco.workers.names import named_parameters
from diloco.workers.parameters import fully_sharded, local_of, trained_tensors
from diloco.workers.ranks.placement import Block
from diloco.workers.ranks.shutdown import wait_for_gloo_threads
from diloco.workers.ranks.step_agreement import DataPlace
from diloco.workers.ranks.transport import TOKEN_BYTES, accept_calls, call_lower_ranks, listen
from diloco.workers.times import TIMES

# Timeout of the gloo group. It only bounds the wait for a rank that hangs; the death of a rank is noticed at once.
GROUP_TIMEOUT = timedelta(hours=1)
# Timeout for collectives that the ranks enter together after training. It is long because one rank may first read from
# a bus that is temporarily unavailable.
BROADCAST_TIMEOUT = timedelta(minutes=5)
# A value of `mesh`: all ranks of torch.distributed, if there are several.
WORLD = "world"
LOOPBACK = "127.0.0.1"
# The gloo groups of this process's learners, by their ranks. They are kept: `_group_of` says why.
GROUPS = dict[tuple[int, ...], Any]()
NO_RANKS = (
    "torch.distributed has {} ranks, and the model is neither in DistributedDataParallel nor sharded. If they train "
    "one model, wrap it in DistributedDataParallel or shard it with fully_shard before you create the Learner; in a "
    "loop that averages gradients itself, pass mesh= (a DeviceMesh, a process group, or 'world'). Otherwise start "
    "each learner as a separate process without a process group"
)
STALE_STORE = (
    "torchrun with --max-restarts would hang at a restart, because gloo finds stale addresses in torchrun's store. "
    "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and add --rdzv-backend c10d --rdzv-endpoint localhost:29601 (a free "
    "port), or leave out --max-restarts"
)
SHARDS_ONLY = (
    "a learner's ranks must hold shards of rows or columns, or replicas: FSDP2 (fully_shard), HSDP, tensor parallelism "
    "or DDP"
)
MAX_REFUSED = 2**14
M = TypeVar("M", bound=Message)
T = TypeVar("T")
Element = Annotated[int, Field(ge=0, le=2**62)]


class Arguments(Message):
    """The arguments that a rank's learner was given."""

    max_parts: ClassVar[int] = 202

    format: Literal[1] = 1
    arguments: Annotated[tuple[tuple[Text, Annotated[str, Field(max_length=2**14)]], ...], Field(max_length=100)]
    """(name, value as text) of each argument."""


class Readiness(Message):
    """A rank's answer whether it can join."""

    max_bytes: ClassVar[int] = 2**17

    format: Literal[1] = 1
    refused: Annotated[str, Field(max_length=MAX_REFUSED)]
    """The reason why the rank cannot join; empty if it can."""


class Proposal(Message):
    """A rank's proposal, of which all take rank 0's; and what this rank holds."""

    max_bytes: ClassVar[int] = Spec.max_bytes + 64 * 2**20 + 2**10
    max_parts: ClassVar[int] = Spec.max_parts + MAX_TENSORS + 3
    max_items: ClassVar[int] = MAX_TENSORS

    format: Literal[1] = 1
    spec: Spec
    learner: PartyId
    incarnation: Nonce
    token: Annotated[bytes, Field(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """The secret by which the ranks authenticate their connections."""
    machine: Text
    held: Annotated[
        tuple[tuple[Text, Element, Element, Element, Element], ...], Field(max_length=MAX_TENSORS, fail_fast=True)
    ]
    """(name of a tensor, first, last, left, right): the block that the rank holds (`placement.Block`)."""


class Address(Message):
    """The address at which a rank's exchange thread accepts connections."""

    format: Literal[1] = 1
    host: Text
    port: Annotated[int, Field(ge=1, lt=2**16)]


def gather_messages(group: Any, own: M) -> list[M]:
    """Return what each rank says, in rank order, including this one. All ranks call this, each with its own message.

    Raises:
        UsageError: a rank's message cannot be read; all ranks raise this.
        RuntimeError: raised by torch if a rank is gone.
    """
    kind, messages = type(own), list[M]()
    for rank in range(distributed.get_world_size(group)):
        source, data = distributed.get_global_rank(group, rank), bytearray(codec.encode(own))
        size = torch.tensor([len(data)], device="cpu")
        distributed.broadcast(size, source, group)
        if not 0 < (nbytes := int(size)) <= kind.max_bytes:
            raise UsageError(f"rank {rank} of this learner announced {nbytes} bytes, but the limit is {kind.max_bytes}")
        if distributed.get_rank(group) != rank:
            data = bytearray(nbytes)
        distributed.broadcast(torch.frombuffer(data, dtype=torch.uint8), source, group)
        try:
            messages.append(codec.decode(kind, bytes(data)))
        except BadMessage as error:
            raise UsageError(f"rank {rank} of this learner sent an unreadable message: {error}") from error
    return messages


def ranks_of(model: nn.Module, mesh: Any = None, names: Collection[str] | None = None) -> tuple[int, ...]:
    """Return the global ranks that form one learner with this process; empty if it is a learner on its own.

    Args:
        model: the model to train.
        mesh: a DeviceMesh, a process group, `WORLD`, or None.
        names: of the trained parameters, which may be frozen for a while; None: those that require a gradient.

    Raises:
        UsageError: the ranks cannot form one learner; the message gives the reason.
    """
    found = _given(mesh)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if nobody has imported it, no module can be FSDP1
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise UsageError(
                f"module {name or 'model'} is wrapped in FullyShardedDataParallel (FSDP1), which hides parameters in "
                f"flat ones: use fully_shard; {SHARDS_ONLY}"
            )
        if isinstance(module, DistributedDataParallel):
            found = _same(found, tuple(distributed.get_process_group_ranks(module.process_group)), "the model's DDP")
    trained = trained_tensors(model) if names is None else {n: one for n, one in named_parameters(model) if n in names}
    sharded = {name: tensor for name, tensor in trained.items() if hasattr(tensor, "device_mesh")}
    for name, tensor in sharded.items():
        _check_placements(name, tensor)
    meshes = {name: tuple(tensor.device_mesh.mesh.flatten().tolist()) for name, tensor in sharded.items()}
    largest = max(meshes.values(), key=len, default=())
    for name, ranks in meshes.items():  # what tensor parallelism leaves alone may have a part of the mesh
        found = _same(found, largest if set(ranks) <= set(largest) else ranks, f"parameter {name}")
    if fully_sharded(model) and len(sharded) < len(trained):
        plain = next(name for name in trained if name not in sharded)
        raise UsageError(f"parameter {plain} is trained but, unlike others, not sharded: shard it, or freeze it")
    if not found and (size := _world_size()) > 1:
        raise UsageError(NO_RANKS.format(size))
    if found and distributed.get_rank() not in found:
        raise UsageError(
            f"this process is rank {distributed.get_rank()}, which does not belong to the learner: {found}"
        )
    if len(found) > 1:
        _check_restarts()
    return () if len(found) == 1 and not sharded else found


def check_ranks(known: tuple[int, ...], model: nn.Module, mesh: Any, names: Collection[str] | None = None) -> None:
    """Check that a model still has the ranks `known`. The other arguments: see `ranks_of`.

    Raises:
        UsageError: they are other ranks now.
    """
    if ranks_of(model, mesh, names) != known:
        raise UsageError(
            "the model's ranks changed after its Learner was created: set up the ranks and wrap the model first"
        )


def _check_restarts() -> None:
    """Raise UsageError if ranks that torchrun restarts would wait forever, as they would even without a learner."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UsageError(STALE_STORE)


def _world_size() -> int:
    here = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if here else 1


def _given(mesh: Any) -> tuple[int, ...]:
    if mesh is None or (mesh == WORLD and _world_size() == 1):
        return ()
    if not (distributed.is_available() and distributed.is_initialized()):
        raise UsageError("mesh= without a process group: call torch.distributed.init_process_group first")
    if mesh == WORLD:
        return tuple(range(_world_size()))
    if isinstance(mesh, distributed.ProcessGroup):
        return tuple(distributed.get_process_group_ranks(mesh))
    if isinstance(mesh, distributed.device_mesh.DeviceMesh):
        return tuple(mesh.mesh.flatten().tolist())
    raise UsageError(
        f'mesh is a {type(mesh).__name__}: pass a DeviceMesh or a process group of the learner\'s ranks, or "world"'
    )


def _same(found: tuple[int, ...], ranks: tuple[int, ...], whose: str) -> tuple[int, ...]:
    if found and sorted(found) != sorted(ranks):
        raise UsageError(f"{whose} has ranks {sorted(ranks)}, but the learner has {sorted(found)}")
    return found or ranks


def _check_placements(name: str, tensor: Any) -> None:
    """Refuse a DTensor of which the ranks do not hold blocks of rows and columns."""
    if any(one.is_partial() or _dim_of(one) > 1 for one in tensor.placements):
        raise UsageError(f"parameter {name} is placed as {tensor.placements}; {SHARDS_ONLY}")


def _dim_of(placement: Any) -> int:
    """Return the dimension that a placement divides; -1 if it divides none."""
    return getattr(placement, "dim", -1)  # torch's _StridedShard (FSDP2 over tensor parallelism) is no Shard


def held(tensors: Mapping[str, torch.Tensor]) -> dict[str, Block]:
    """Return the block of each tensor that this rank holds."""
    return {name: _block(name, tensor) for name, tensor in tensors.items()}


def _block(name: str, tensor: Any) -> Block:
    shape, offset = list(tensor.shape), [0] * tensor.dim()
    if hasattr(tensor, "device_mesh"):
        mesh = tensor.device_mesh
        if (coordinate := mesh.get_coordinate()) is None:
            return Block(0, 0, 0, 0)
        # Each dimension of the mesh divides what is left, as `torch.chunk` does; FSDP2 comes after tensor parallelism,
        # though it stands before it. torch's own function for this is wrong there if rows are uneven.
        for d in sorted(range(mesh.ndim), key=lambda d: hasattr(tensor.placements[d], "split_factor")):
            if (dim := _dim_of(tensor.placements[d])) >= 0:
                each = -(-shape[dim] // mesh.size(d))
                start = min(each * coordinate[d], shape[dim])
                offset[dim] += start
                shape[dim] = min(each, shape[dim] - start)
        here = local_of(tensor)
        if here.numel() != math.prod(shape):
            raise UsageError(
                f"parameter {name}, placed as {tensor.placements}: this rank holds {tuple(here.shape)}, but "
                f"{tuple(shape)} were expected; {SHARDS_ONLY}"
            )
    if not math.prod(shape):
        return Block(0, 0, 0, 0)
    (rows, columns), (first, left), rest = (*shape, 1, 1)[:2], (*offset, 0, 0)[:2], math.prod(shape[2:])
    return Block(first, first + rows, left * rest, (left + columns) * rest)


def data_place(model: nn.Module, rank: int, ranks: int) -> DataPlace:
    """Return which data a rank trains on: ranks that divide layers between them (tensor parallelism) have the same.

    `fully_shard` wants the mesh's dimensions of the data before those of tensor parallelism, and divides rows over the
    first dimension that divides anything. Without it, no dimension of the data divides parameters.
    """
    tensors: list[Any] = [one for one in trained_tensors(model).values() if hasattr(one, "device_mesh")]
    if not tensors:
        return DataPlace(rank, ranks, rank)
    mesh = max((one.device_mesh for one in tensors), key=lambda mesh: mesh.ndim)
    placements = [one.placements for one in tensors if one.device_mesh == mesh]
    divided = [d for d in range(mesh.ndim) if any(_dim_of(one[d]) >= 0 for one in placements)]
    rest = divided[1:] if fully_sharded(model) else divided
    data = [d for d in range(mesh.ndim) if d not in rest]
    groups = mesh.mesh.permute(data + rest).reshape(-1, math.prod(mesh.shape[d] for d in rest))  # global ranks
    number = int((groups == distributed.get_rank()).any(1).nonzero())
    first = sorted(groups.flatten().tolist()).index(int(groups[number, 0]))
    return DataPlace(number, len(groups), first)


def _wait(work: Any, within: timedelta | None) -> None:
    try:
        work.wait() if within is None else work.wait(within)
    except RuntimeError as error:
        raise RankGone(f"a rank of this learner has ended, so the learner ends too: {error}") from error


class GlooSum:
    """An all-reduce over the gloo group, started on construction. Implements `step_agreement.Sum`."""

    def __init__(self, group: Any, numbers: Sequence[int]) -> None:
        self._vector = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._work = distributed.all_reduce(self._vector, group=group, async_op=True)

    @property
    def done(self) -> bool:
        """Return whether the sum is complete."""
        return bool(self._work.is_completed())

    def wait(self, within_s: float | None = None) -> list[int]:
        """Wait for the sum and return it; raises RankGone as `step_agreement.Sum.wait` does."""
        _wait(self._work, None if within_s is None else timedelta(seconds=within_s))
        found: list[int] = self._vector.tolist()
        return found


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of one learner after they have met. For the training thread."""

    gloo: Any
    """A gloo group for the learner's own use; it outlives the training."""
    rank: int
    """This process's rank in `gloo`. Rank 0 speaks for the learner."""
    learner: tuple[str, str]
    """The learner's id and incarnation, as rank 0 has them."""
    spec: Spec
    """The spec that rank 0 proposes."""
    held: tuple[dict[str, Block], ...]
    """The blocks that each rank holds, by rank."""
    connections: Mapping[int, socket.socket]
    """The connection to each other rank, for `transport.Transport`."""
    place: DataPlace
    """The data that this rank trains on; implements `step_agreement.Collectives.place`."""

    def start_sum(self, numbers: Sequence[int]) -> GlooSum:
        """Start a sum over all ranks; implements `step_agreement.Collectives.start_sum`."""
        return GlooSum(self.gloo, numbers)

    def leak_groups(self) -> None:
        """Let this process end even though a process group has a collective in flight with a rank that is gone.

        gloo cannot abort a collective, and destroying a group waits for what is in flight: ranks that end would wait
        for each other.
        """
        # With one more reference a group is never destroyed, neither by the loop nor by the interpreter's shutdown.
        for group in list(distributed.distributed_c10d._world.pg_map):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        # The shutdown would first collect garbage among all of torch's objects: one CPU second, many on a busy machine.
        gc.freeze()

    @staticmethod
    def abort() -> None:
        """Abort the collectives in flight, so that a training thread waiting for one continues. NCCL supports this."""
        for group in list(distributed.distributed_c10d._world.pg_map):
            with suppress(RuntimeError):  # a backend that cannot be aborted
                group.abort()

    def broadcast(self, source: int, elements: int, make: Callable[[], Float32]) -> Float32:
        """Return on all ranks the vector (elements,) that rank `source` makes. All ranks call this together.

        Raises:
            RankGone: another rank did not call this, or `source` could not make the vector.
            Exception: on rank `source`, whatever `make` raised.
        """
        whole, failure = np.empty(0, np.float32), None
        if self.rank == source:
            try:
                whole = make()
            except Exception as error:  # raised below, after the other ranks have been told: they wait in the broadcast
                failure = error
        made = torch.tensor([failure is None], device="cpu")
        first = distributed.get_global_rank(self.gloo, source)
        _wait(distributed.broadcast(made, first, self.gloo, async_op=True), BROADCAST_TIMEOUT)
        if failure is not None:
            raise failure
        if not made:
            raise RankGone(
                f"rank {source} of this learner could not read a value that all ranks need: see its log for the error"
            )
        whole = whole if self.rank == source else np.empty(elements, np.float32)
        _wait(distributed.broadcast(torch.from_numpy(whole), first, self.gloo, async_op=True), BROADCAST_TIMEOUT)
        return whole


def rendezvous(
    ranks: Sequence[int],
    model: nn.Module,
    propose: Callable[[], Spec],
    learner: tuple[str, str],
    asked: Mapping[str, str],
) -> RankGroup:
    """Wait for all ranks of a learner, and learn which blocks each holds.

    Args:
        ranks: the learner's global ranks.
        model: this rank's model.
        propose: returns the spec that this rank would propose; an error that it raises on one rank reaches all ranks.
        learner: id and incarnation that this process would have as a learner on its own.
        asked: arguments of the `Learner` that must be equal on all ranks, as text.

    Raises:
        UsageError: on all ranks, if their models or arguments differ or one of them cannot propose a spec.
        RankGone: a rank is gone.
    """
    try:
        with _warn_if_slow(ranks):
            group = _group_of(tuple(sorted(ranks)))
            rank = distributed.get_rank(group)
            _same_arguments(gather_messages(group, Arguments(arguments=tuple(asked.items()))))
            spec, blocks = _on_all(group, lambda: (propose(), held(_synchronised(model))))
            own = Proposal(
                spec=spec,
                learner=learner[0],
                incarnation=learner[1],
                token=secrets.token_bytes(TOKEN_BYTES),
                machine=socket.gethostname(),
                held=tuple((name, *found) for name, found in blocks.items()),
            )
            agreed, *_ = proposals = gather_messages(group, own)
            _same_model(proposals)
            connections = _connect(group, [one.machine for one in proposals], agreed.token)
    except RuntimeError as error:
        raise RankGone(f"the ranks of this learner could not connect: {error}") from error
    holds = tuple({name: Block(*block) for name, *block in one.held} for one in proposals)
    place = data_place(model, rank, len(proposals))
    return RankGroup(group, rank, (agreed.learner, agreed.incarnation), agreed.spec, holds, connections, place)


def _connect(group: Any, machines: Sequence[str], token: bytes) -> dict[int, socket.socket]:
    """Connect this rank to all others; return the connections by rank. machines: of all ranks."""
    rank, ranks, alone = distributed.get_rank(group), len(machines), len(set(machines)) == 1
    with listen(LOOPBACK if alone else "") as listener:
        host = LOOPBACK if alone else _own_address(machines[rank] == machines[0])
        found = gather_messages(group, Address(host=host, port=listener.getsockname()[1]))
        addresses = [(one.host, one.port) for one in found]
        connections = _on_all(group, partial(call_lower_ranks, rank, addresses, token))
        # All have called, so none of these calls is waited for.
        return connections | _on_all(group, partial(accept_calls, listener, rank, ranks, token))


@contextmanager
def _warn_if_slow(ranks: Sequence[int]) -> Iterator[None]:
    """Warn if the ranks take long to meet.

    Before they have met, nothing detects a missing rank, not even one that has died: torch waits for it.
    """
    detail = (
        f"all {len(ranks)} ranks must create their Learner: the log of a slow rank shows what it is waiting for; if "
        "one has ended, stop the others (torchrun does)"
    )
    timer = threading.Timer(TIMES.joining_told_s, structlog.get_logger().warning, ["ranks_awaited"], {"detail": detail})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _on_all(group: Any, do: Callable[[], T]) -> T:
    """Return what `do` returns once it has succeeded on every rank.

    A rank on which it fails reports its refusal to all; otherwise the others would wait for it in the next exchange.
    """
    refusal: DilocoError | None = None
    try:
        done = do()
    except DilocoError as error:
        refusal = error
    answers = gather_messages(group, Readiness(refused="" if refusal is None else str(refusal)[:MAX_REFUSED]))
    if refusal is not None:
        raise refusal
    for rank, one in enumerate(answers):
        if one.refused:
            raise UsageError(f"rank {rank} of this learner cannot join: {one.refused}")
    return done


def _same_arguments(messages: Sequence[Arguments]) -> None:
    """Refuse on all ranks if the arguments of one rank differ from rank 0's.

    This check precedes the proposals, because proposing is collective: all ranks gather the frozen shards for it.
    """
    first = dict(messages[0].arguments)
    for rank, one in enumerate(messages):
        pairs = ((name, its, first.get(name)) for name, its in one.arguments)
        differ = [f"  {name}: {its}; rank 0: {its_0}" for name, its, its_0 in pairs if its != its_0]
        _refuse(rank, "different arguments", "\n".join(differ))


def _same_model(proposals: Sequence[Proposal]) -> None:
    for rank, one in enumerate(proposals):
        if _tensors(one.spec) != _tensors(proposals[0].spec):
            _refuse(rank, "a different model", differences(one.spec, proposals[0].spec))


def _refuse(rank: int, what: str, differ: str) -> None:
    if differ:
        raise UsageError(f"rank {rank} of this learner has {what} than rank 0; all must have the same:\n{differ}")


def _group_of(ranks: tuple[int, ...]) -> Any:
    """Return the gloo group of these ranks, which is created once and kept.

    A second group of the same ranks would find the stale addresses of the first one in torch's store.
    """
    if not GROUPS:
        atexit.register(wait_for_gloo_threads)
    if GROUPS.get(ranks) not in distributed.distributed_c10d._world.pg_map:
        GROUPS[ranks] = distributed.new_group(
            list(ranks), timeout=GROUP_TIMEOUT, backend="gloo", use_local_synchronization=True
        )
    return GROUPS[ranks]


def _tensors(spec: Spec) -> dict[str, tuple[tuple[int, ...], str]]:
    return {tensor.name: (tensor.shape, tensor.dtype) for tensor in spec.tensors}


def _synchronised(model: nn.Module) -> dict[str, torch.Tensor]:
    trained = trained_tensors(model)
    buffers = averaged_buffers(model, map(local_of, trained.values()))
    return trained | {name: tensor for name, buffer in buffers.items() if (tensor := buffer.tensor) is not None}


def _own_address(beside_rank_0: bool) -> str:
    """Return an address of this machine that the others can reach: that from which torch's own store is reached."""
    master = os.environ.get("MASTER_ADDR", socket.gethostname())
    if beside_rank_0:
        return master
    for family, *_, address in sorted(socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)):  # IPv4 first
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:  # no route: try the next one
            probe.connect(address)  # UDP: this picks a local address and sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()
