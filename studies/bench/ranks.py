"""What `learner.step()` costs a rank beside what it costs a single process: `python -m diloco.studies.bench.ranks`.

The same model, batch and settings: one process by itself, then two ranks in DDP. Each has one thread.
"""

import argparse
import os
import socket
import subprocess
import sys

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from diloco.pipeline.settings import SyncSettings
from diloco.studies.bench.end_to_end import Fleet, server
from diloco.workers.learner import Learner
from diloco.workers.trainer.models.gpt import build

WARM_STEPS = 5


def train(url: str, run: str, model: str, tokens: int, steps: int) -> None:
    """One process, or one rank; rank 0 prints milliseconds: of a step, and of the library's part in it."""
    torch.set_num_threads(1)
    ranks, plain = int(os.environ.get("WORLD_SIZE", "1")), build(model, 0)
    if ranks > 1:
        distributed.init_process_group("gloo")
    trained = DistributedDataParallel(plain) if ranks > 1 else plain
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)
    data = torch.randint(0, 256, (1, tokens + 1))
    sync = SyncSettings(fragments=4, sync_interval=24, codec="bf16", first_interval=0, tokens=2**60)
    with Learner(trained, optimizer, run=run, redis_url=url, learner_id=f"of-{ranks}", sync=sync) as learner:
        before = 0.0, 0.0
        for step in range(steps + WARM_STEPS):
            logits = trained(data[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            learner.step(tokens=tokens)
            times = learner.times.reported(learner.times._returned, True)
            if step == WARM_STEPS - 1:
                before = times["wall_s"], times["blocked_s"]
        wall_ms, blocked_ms = (
            1000 * (now - then) / steps for now, then in zip((times["wall_s"], times["blocked_s"]), before, strict=True)
        )
    if int(os.environ.get("RANK", "0")) == 0:
        share = blocked_ms / (wall_ms - blocked_ms)
        print(f"ranks {ranks}: a step {wall_ms:.1f} ms, stands still {blocked_ms:.3f} ms, {share:.2%}", flush=True)
    if ranks > 1:
        distributed.destroy_process_group()


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="base")
    parser.add_argument("--tokens", type=int, default=256, help="in a batch")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--of", nargs=2, metavar=("URL", "RUN"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.of is not None:
        url, run = given.of
        train(url, run, given.model, given.tokens, given.steps)
        return
    command = [sys.executable, "-m", "diloco.studies.bench.ranks", *sys.argv[1:], "--of"]
    for ranks in (1, given.ranks):
        with server(None, False) as url, Fleet(None, url) as fleet, socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
            probe.close()
            group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            started = [
                subprocess.Popen([*command, url, fleet.run], env=os.environ | group | {"RANK": str(rank)})
                for rank in range(ranks)
            ]
            for one in started:
                one.wait()


if __name__ == "__main__":
    main()
