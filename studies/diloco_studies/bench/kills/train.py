"""A rank of data-parallel training as people write it: torch's DDP, begun again by torchrun from the newest checkpoint.

    torchrun --nnodes 3:4 --nproc-per-node 1 ... train.py SETTINGS FOLDER MACHINE

Model, text, batches, optimizer and schedule are the built-in trainer's. Rank 0 saves after every step, so that a kill
costs the step under way and nothing else.
"""

import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.process.signals import die_with_parent
from diloco.pipeline.settings import PARTIES, RankProcess, load
from diloco.workers.schedule import learning_rate
from diloco.workers.trainer.data_parallel import parts_of
from diloco.workers.trainer.recipe import add_gradients, read_batch, update

CHECKPOINT = "newest.pt"
COLLECTIVE_TIMEOUT = timedelta(seconds=10)
"""For a peer that hangs; of one that is killed the connection breaks at once."""


def train(settings: RankProcess, out: Path, machine: str) -> None:
    """Train until the budget is spent; torchrun's variables are in the environment."""
    parts = parts_of(settings)
    count, size = parts.blocks.count, settings.batch
    newest = out / CHECKPOINT
    steps = read = 0  # of blocks, by all ranks
    if newest.is_file():
        saved = torch.load(newest)
        parts.model.load_state_dict(saved["model"])
        for optimizer, state in zip(parts.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        steps, read = saved["steps"], saved["blocks"]

    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(parts.model)
    life = f"{time.time():.3f}"
    with (out / "learners" / machine / "losses.jsonl").open("a", 1) as record:
        while read * settings.seq_len < settings.tokens:
            started = time.monotonic()
            mine = (divmod(read + place, count) for place in range(rank, ranks * size, ranks))
            loss = add_gradients(model, [read_batch(parts.blocks, mine, size, parts.device)], 1)
            lr = learning_rate(
                read * settings.seq_len / settings.tokens,
                steps,
                peak=settings.lr,
                min_ratio=settings.min_lr_ratio,
                warmup=settings.warmup,
            )
            update(model, parts.optimizers, lr, settings.clip)
            steps, read = steps + 1, read + ranks * size
            if rank == 0:
                states = [optimizer.state_dict() for optimizer in parts.optimizers]
                state = {"model": parts.model.state_dict(), "optimizers": states}
                torch.save({**state, "steps": steps, "blocks": read}, newest.with_suffix(".part"))
                newest.with_suffix(".part").replace(newest)
            time.sleep(max(0.0, started + settings.pace - time.monotonic()))
            line = {"incarnation": life, "step": steps, "unix_s": time.time(), "loss": loss.item()}
            record.write(dumps(line) + "\n")
    dist.destroy_process_group()


def main(config: str, out: str, machine: str) -> None:
    """One life of this rank; what breaks it is in its machine's log."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the agent's handler, which raises
    die_with_parent(os.getppid())
    try:
        train(load(RankProcess, {}, Path(config), known=PARTIES), Path(out), machine)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: torchrun begins again when all ranks have ended


if __name__ == "__main__":
    main(*sys.argv[1:])
