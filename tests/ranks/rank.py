"""One rank of a learner, as a program: `python rank.py KIND NAME FOLDER`; the process group's variables say which.

KIND is plain, ddp, fsdp, hsdp, tp (tensor parallelism), fsdp-tp (FSDP2 over pairs that divide layers), or a loop's
own: mean averages gradients, apart forgets to. The model has tensors that no number of ranks divides: a vocabulary of
257, a bias of 2. At the end the model that all ranks have together is written to FOLDER/NAME.pt.
"""

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from diloco import Learner
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.payload.codec import Payload, PayloadReader, decode
from diloco.workers.ranks import topology
from diloco.workers.ranks.gather import Transfers
from diloco.workers.rounds import Rounds
from diloco_studies.virtual.memory_fragments import chunk_size
from tests.ranks.dying import die_as_told

kind, name, folder = sys.argv[1:4]
step_s = float(os.environ.get("TEST_STEP_S", "0.02"))
dtype = getattr(torch, os.environ.get("TEST_DTYPE", "float32"))
torch.set_num_threads(1)
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
die_as_told(rank)


class Model(nn.Module):
    """Predicts the next of 257 symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 16)
        self.narrow, self.wide = nn.Linear(16, 2), nn.Linear(2, 16, bias=False)
        self.head = nn.Linear(16, 257)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) to (B, T, 257)."""
        h = self.embedding(x)
        return self.head(h + torch.tanh(self.wide(self.narrow(h))))


class Rows:
    """Stands for this rank's own loader, which knows how far it has read."""

    read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Counted:
    """Bytes of the payloads that this process sends and reads."""

    sent = read = 0


def count(owner: type, name: str, field: str, size: Callable[[Any, Any], int]) -> None:
    """Add up what calls of a method carry."""
    before = getattr(owner, name)

    def counting(self: Any, given: Any) -> Any:
        answer = before(self, given)
        setattr(Counted, field, getattr(Counted, field) + size(given, answer))
        return answer

    setattr(owner, name, counting)


def tell_offers() -> None:
    """Say it where all that is unmerged is to be offered again."""
    before = Rounds.offer_again

    def offering(self: Rounds) -> None:
        print("offers again", flush=True)
        before(self)

    Rounds.offer_again = offering  # type: ignore[method-assign]


def keep_adopted() -> None:
    """Write down what is adopted: of each rank its own rows, and of each pulled global what its server knows of it."""
    pull, given = Transfers._pull, Transfers._given

    async def pulling(self: Any, asker: int, p: int, number: int, at_once: bool, encoded: bytes) -> bool:
        head = decode(Head, encoded)
        base = f"{head.version} {head.digest.hex()} {(head.payload_digest or b'').hex() or '-'}"
        done = await pull(self, asker, p, number, at_once, encoded)
        if done:
            print(f"pulled {p} {number} {base}", flush=True)
        return done

    def giving(self: Any, p: int, number: int, at_once: bool, own: Any) -> None:
        pieces = [(one.start, one.at, one.elements) for one in self._shares.pieces(rank, p)]
        numpy.savez(f"{folder}/{name}-{rank}-{p}-{number}.npz", own=own, pieces=numpy.array(pieces).reshape(-1, 3))
        given(self, p, number, at_once, own)

    Transfers._pull, Transfers._given = pulling, giving  # type: ignore[method-assign]


if os.environ.get("TEST_KEEP"):
    keep_adopted()
tell_offers()
count(Payload, "encoded", "sent", lambda index, chunk: chunk_size(chunk))
count(PayloadReader, "feed", "read", lambda chunk, _: chunk_size(chunk))
even = [layer for _ in range(5) for layer in (nn.Linear(64, 64, bias=False), nn.Tanh())]
model: nn.Module = nn.Sequential(nn.Embedding(64, 64), *even[:-1]) if os.environ.get("TEST_EVEN") else Model()
model.to(dtype)
symbols = 64 if os.environ.get("TEST_EVEN") else 257
if size > 1 or kind != "plain":
    torch.distributed.init_process_group("gloo")
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif kind in ("fsdp", "hsdp"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((size,), ("shard",)) if kind == "fsdp" else ((2, size // 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in [child for child in model.children() if isinstance(child, (nn.Embedding, nn.Linear))]:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif kind in ("tp", "fsdp-tp"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    pairs = size if kind == "tp" else 2
    mesh = init_device_mesh("cpu", (size // pairs, pairs), mesh_dim_names=("shard", "tensor"))
    plan: dict[str, Any] = {"narrow": ColwiseParallel(), "wide": RowwiseParallel()}
    if kind == "tp":  # torch's FSDP2 refuses rows that tensor parallelism divides unevenly
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    else:
        plan["embedding"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], plan)
    if kind == "fsdp-tp":
        for part in model.children():
            fully_shard(part, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
torch.distributed.distributed_c10d._unpickler = None  # from here on whoever unpickles what came over a wire fails
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
errs, how, at = os.environ.get("TEST_ERRS", "-1 no -9").split()
errs_at = int(at) if int(errs) == rank else -9
"""After so many steps this rank leaves its loop, by a break or an error, and the others do not."""
group = rank // {"tp": size, "fsdp-tp": 2}.get(kind, 1)
"""Ranks of one group train on the same data."""
generator = torch.Generator().manual_seed(1000 * len(name) + group)
state = f"{folder}/state-{name}" if os.environ.get("TEST_STATE") else None
mesh_given = "world" if kind in ("mean", "apart") else None
kept = Rows()
given: dict[str, Any] = {"run": "ranks", "learner_id": name, "mesh": mesh_given}
given["state"] = {"data": kept} if state and kind not in ("tp", "fsdp-tp") else None
with Learner(model, optimizer, state_dir=state, state_every_s=0.2, **given) as learner:
    print(f"joined {learner.recovered} {learner.earlier_steps} {kept.read}", flush=True)
    steps = 0
    dealt = iter(())
    if os.environ.get("TEST_BATCHES"):
        batches = learner.batches(int(os.environ["TEST_BATCHES"]), 4, seed=1)
        loader = torch.utils.data.DataLoader(range(int(os.environ["TEST_BATCHES"])), batch_sampler=batches)
        dealt = itertools.chain.from_iterable(itertools.repeat(loader))
    while not learner.finished:
        if steps == errs_at:
            if how == "break":
                break
            raise OSError("the data has ended")
        x = torch.randint(symbols, (4, 8 + 8 * group), generator=generator)
        rows = next(dealt, None)
        kept.read += 1 + rank
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1).float(), ((3 * x + 1) % symbols).flatten())
        loss.backward()
        for parameter in model.parameters() if kind == "mean" else ():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(step_s)
        learner.step(tokens=x.numel(), loss=loss)
        if rows is not None:
            print(f"rows {' '.join(str(int(row)) for row in rows)}", flush=True)
        steps += 1
        if steps % 10 == 0:
            print(f"step {steps} blocked {1000 * learner.times.blocked_s / steps:.3f} ms", flush=True)
print(f"left {learner.left_in_order} {steps} {Counted.sent} {Counted.read}", flush=True)
taken = list[Any]()
if os.environ.get("TEST_GO"):  # ranks come one after the other, while the run goes on
    broadcast = topology.RankGroup.broadcast

    def handed(*given: Any) -> Any:
        """As before, and kept."""
        taken.append(broadcast(*given))
        return taken[-1]

    topology.RankGroup.broadcast = handed  # type: ignore[method-assign]
    while not Path(f"{folder}/go-{rank}").exists():
        time.sleep(0.05)
learner.load_globals()
state_dict = {key.removeprefix("module."): value for key, value in model.state_dict().items()}
whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state_dict.items()}
heads = learner.globals()
if taken:
    held = learner._once_joined._shares.layout.whole(taken)
    heads = {key: torch.from_numpy(value) for key, value in held.items()}
print(f"alike {all(torch.equal(whole[key], heads[key]) for key in heads)} {len(heads)}", flush=True)
for one in taken:
    print(f"took {hashlib.sha256(one).hexdigest()}", flush=True)
if taken:
    with Learner(model, optimizer, run="ranks", learner_id=name) as learner:
        for _ in range(5):
            model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
            optimizer.step()
            learner.step(tokens=4)
    print("again", flush=True)
if rank == 0:
    torch.save(whole, f"{folder}/{name}.pt")
if size > 1 or kind != "plain":
    torch.distributed.destroy_process_group()
