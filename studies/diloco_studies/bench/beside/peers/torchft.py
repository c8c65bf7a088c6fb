"""torchft: DiLoCo of one replica; a Manager each, one lighthouse (in the first replica's process), gloo between them.

A round is the optimizer step that synchronises: quorum, all-reduce of the pseudogradients, vote, outer step. The
trainer stands still for all of it, and what was merged is in the model when it returns.
"""

import json
import os
import sys
import time
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is documented there
from torchft import Manager, ProcessGroupGloo
from torchft._torchft import LighthouseServer
from torchft.local_sgd import DiLoCo

LIMIT = timedelta(seconds=60)


class Fragment(nn.Module):
    """Random weights of the given shapes."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        for seed, (name, shape) in enumerate(shapes.items()):
            generator = torch.Generator().manual_seed(seed)
            self.register_parameter(name, nn.Parameter(torch.empty(shape).normal_(0.0, 0.02, generator=generator)))


class Replica:
    """One of them."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.number, momentum = given["number"], given["momentum"]
        self.lighthouse, address = None, given["address"]
        if address is None:
            self.lighthouse = LighthouseServer(bind="[::]:0", min_replicas=given["learners"], quorum_tick_ms=10)
            address = f"http://localhost:{self.lighthouse.address().rpartition(':')[2]}"
        self.address = address
        self.fragments = nn.ModuleList(Fragment(shapes) for shapes in given["fragments"])
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=LIMIT),
            min_replica_size=given["learners"],
            load_state_dict=self.fragments.load_state_dict,
            state_dict=self.fragments.state_dict,
            use_async_quorum=False,
            timeout=LIMIT,
            quorum_timeout=LIMIT,
            replica_id=f"replica_{self.number}",
            store_addr="localhost",
            store_port=self.store.port,
            lighthouse_addr=address,
            hostname="localhost",
            rank=0,
            world_size=1,
            init_sync=False,
        )
        self.inner = torch.optim.SGD(self.fragments.parameters(), lr=1e-9)
        outer = [
            torch.optim.SGD(one.parameters(), lr=given["outer_lr"], momentum=momentum, nesterov=momentum > 0)
            for one in self.fragments
        ]
        self.buckets = given.get("buckets", False)
        # A step each synchronises one fragment.
        self.diloco = DiLoCo(
            self.manager, list(self.fragments), self.inner, outer, len(outer), use_bucketization=self.buckets
        )
        self.diloco.__enter__()

    def hello(self) -> dict[str, Any]:
        """What is measured."""
        return {
            "versions": {"torchft": version("torchft"), "torch": torch.__version__},
            "settings": f"DiLoCo, gloo over loopback, all-reduce of {'buckets' if self.buckets else 'each tensor'}, "
            "plain mean; the trainer waits",
            "address": self.address,
        }

    @torch.no_grad()
    def prepare(self) -> dict[str, Any]:
        """Move the weights, each replica by something else."""
        for tensor in self.fragments.parameters():
            tensor.mul_(1.0 - 1e-3 * (1 + self.number))
        return {}

    def round(self) -> dict[str, Any]:
        """The step that synchronises."""
        step, began = self.manager.current_step(), time.monotonic()
        self.inner.step()
        adopted = time.monotonic()
        if self.manager.current_step() != step + 1:
            raise RuntimeError("torchft did not commit this round")
        return {"began": began, "blocked_s": adopted - began, "adopted": adopted}

    @torch.no_grad()
    def check(self) -> dict[str, Any]:
        """What the replica has adopted last; the manager has counted on since then."""
        synchronised = self.fragments[(self.manager.current_step() - 1) % len(self.fragments)]
        squares = (float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in synchronised.parameters())
        return {"lengths": [sum(squares) ** 0.5]}


def main() -> None:
    """Say hello, then answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    replica = Replica(json.loads(sys.argv[1]))
    print(json.dumps(replica.hello()), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(replica, line.strip())()), file=answers, flush=True)
    os._exit(0)  # a manager would wait for its peers


if __name__ == "__main__":
    main()
