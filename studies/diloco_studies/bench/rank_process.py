"""One process or one rank that `diloco_studies.bench.ranks` measures: it says a line of JSON for each of its steps."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.settings import SyncSettings
from diloco.workers.exchange.carrier import OwnCarrier
from diloco.workers.learner import Learner
from diloco.workers.parameters import FragmentParameters
from diloco.workers.trainer.models.gpt import build
from diloco_studies.bench.machine import peak_mb, reset_peak

DID = {OwnCarrier: ("upload", "upload_encoded", "pull"), FragmentParameters: ("snapshot", "overwrite")}
"""What is noted of each step, by method."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """What it is to do."""

    kind: str
    """plain, ddp or fsdp."""
    learner: str
    url: str
    run: str
    model: str
    sync: dict[str, Any]
    steps: int
    tokens: int = 64
    """In a batch."""
    pace_s: float = 0.0
    """A step takes so long, if it does not take longer; the loop sleeps."""
    trains: bool = True
    """False: parameters move a little, and nothing else of a step is there, so that memory is the library's alone."""


@dataclass(slots=True)
class Noted:
    """What has happened since it was last said."""

    did: set[str] = field(default_factory=set)

    def watch(self, owner: type, name: str) -> None:
        """Note calls of a method, as they begin and as they end."""
        before = getattr(owner, name)

        def noting(*given: Any) -> Any:
            self.did.add(name)
            return before(*given)

        async def noting_both(*given: Any) -> Any:
            self.did.add(name)
            try:
                return await before(*given)
            finally:
                self.did.add(name)

        setattr(owner, name, noting_both if owner is OwnCarrier else noting)


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    """As the kind says, over all ranks there are."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for part in [module for module in model.modules() if type(module).__name__ == "Block"]:
            fully_shard(part)
        fully_shard(model)
    return model


def rss_mb() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def say(**what: Any) -> None:
    """A line."""
    print(dumps(what), flush=True)


def main() -> None:
    """Until the run is finished or all steps are done."""
    told = RankTask(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pid, rank = os.getpid(), int(os.environ.get("RANK", "0"))
    if told.kind != "plain":
        distributed.init_process_group("gloo")
    model = wrapped(told.kind, build(told.model, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=told.kind != "fsdp")
    data = torch.randint(0, 256, (1, told.tokens + 1), generator=torch.Generator().manual_seed(rank))
    here = [getattr(p, "to_local", lambda p=p: p)().detach().view(-1)[:1000] for p in model.parameters()]

    def train() -> None:
        logits = model(data[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def move() -> None:
        for one in here:
            one.add_(1e-4)

    step: Callable[[], None] = train if told.trains else move
    step()
    noted, began = Noted(), rss_mb()
    for owner, names in DID.items():
        for name in names:
            noted.watch(owner, name)
    reset_peak(pid)
    sync, who = SyncSettings(**told.sync), told.learner
    with Learner(model, optimizer, run=told.run, redis_url=told.url, learner_id=who, sync=sync) as learner:
        elements = [fragment.elements for fragment in learner.joined.training.layout.fragments]
        say(joined=time.monotonic(), peak_mb=peak_mb(pid) - began, rss_mb=rss_mb() - began, elements=elements)
        next_s = time.monotonic()
        for _ in range(told.steps):
            begins = time.monotonic()
            step()
            next_s = max(next_s + told.pace_s, time.monotonic() - told.pace_s)
            time.sleep(max(0.0, next_s - time.monotonic()))
            called, cpu = time.monotonic(), time.thread_time()
            learner.step(tokens=told.tokens)
            in_s, cpu_s = time.monotonic() - called, time.thread_time() - cpu
            say(t=called, step_s=called - begins, in_s=in_s, cpu_s=cpu_s)
            if not told.trains:
                say(peak_mb=peak_mb(pid) - began, rss_mb=rss_mb() - began, did=sorted(noted.did))
                noted.did.clear()
                reset_peak(pid)
            if learner.finished:
                break
        say(ended=True)
        sys.stdin.readline()  # connections are counted before they close
    if told.kind != "plain":
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
