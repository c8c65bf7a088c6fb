"""A rank of the elastic data-parallel baseline (`agent`): each of its lives goes on from the last checkpoint."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import safetensors.torch
import structlog
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.process.lifecycle import die_with_parent
from diloco.pipeline.settings import RankProcess
from diloco.workers.parameters import whole_tensors
from diloco.workers.trainer.data_parallel import (
    CONNECT_TIMEOUT,
    GradientMean,
    block_order,
    parts_of,
    save,
    shared_held_out_loss,
)
from diloco.workers.trainer.recipe import (
    add_gradients,
    read_batch,
    update,
)
from diloco.workers.trainer.schedule import learning_rate

CHECKPOINT_FILE, STOP_FILE, RESULT_FILE = "elastic.safetensors", "stop", "result.json"

log = structlog.get_logger()


def save_state(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, path: Path) -> None:
    """Write parameters, moments and the number of steps; whole or not there."""
    tensors = {f"model.{name}": p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value.cpu() for name, value in state.items()}
    temporary = path.with_name(f".{path.name}")
    safetensors.torch.save_file(tensors, temporary, {"steps": str(steps)})
    temporary.replace(path)


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    """Take up what `save_state` wrote; the number of steps, 0 where there is nothing yet."""
    if not path.is_file():
        return 0
    parameters, state = dict(model.named_parameters()), optimizer.state_dict()
    with safe_open(path, "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118  # it is no mapping
            kind, _, name = key.partition(".")
            if kind == "model":
                parameters[name].copy_(file.get_tensor(key))
            else:
                index, _, name = name.partition(".")
                state["state"].setdefault(int(index), {})[name] = file.get_tensor(key)
        steps = int(file.metadata()["steps"])
    optimizer.load_state_dict(state)
    return steps


def be_rank(settings: RankProcess, out: Path, learners: int, every_s: float) -> None:
    """One life of one rank.

    What breaks it is told in the log and by its status alone: an exception would be left in a file, and the agent ends
    if it finds that file half written, as it is when a rank is killed just then.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with it the agent ends what is left of a broken group
    die_with_parent(os.getppid())
    try:
        train_rank(settings, out, learners, every_s)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def group_of_life(learners: int, rank: int, life: str) -> Iterator[None]:
    """Join the other ranks of this life.

    The agent keeps one store for all lives, in which the ranks leave their addresses: without a prefix of its own a
    life may find those of the one before, and fail.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, learners, False, CONNECT_TIMEOUT)  # type: ignore[attr-defined]
    own = dist.PrefixStore(f"life-{life}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=own, rank=rank, world_size=learners, timeout=CONNECT_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train_rank(settings: RankProcess, out: Path, learners: int, every_s: float) -> None:
    """Train from the last checkpoint on; torchrun's variables are in the environment."""
    rank, life = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    (out / "ranks" / f"learner-{rank}").write_text(str(os.getpid()))

    device, agreed, blocks, model, forward, optimizer, validation = parts_of(settings)
    mean = GradientMean(model, learners, extra=2)
    step_blocks = settings.batch * settings.accumulate
    steps = load_state(model, optimizer, out / CHECKPOINT_FILE)
    order = islice(block_order(blocks.count, rank, learners), steps * step_blocks, None)
    log.info("rank_begins", rank=rank, life=life, steps=steps)

    losses = out / f"learners/learner-{rank}/losses.jsonl"
    with group_of_life(learners, rank, life), losses.open("a", 1) as record:
        # --- train --------------------------------------------------------------------------------
        saved_s = time.monotonic()
        step_tokens, stops = step_blocks * settings.seq_len * learners, 0.0
        while steps * step_tokens < settings.tokens and not stops:
            started = time.monotonic()
            batches = (read_batch(blocks, order, settings.batch, device) for _ in range(settings.accumulate))
            own_loss = add_gradients(forward, batches, settings.accumulate).item()
            loss, stops = mean.reduce([own_loss, rank == 0 and (out / STOP_FILE).exists()])
            lr = learning_rate(
                steps * step_tokens / settings.tokens,
                steps,
                peak=settings.lr,
                min_ratio=settings.min_lr_ratio,
                warmup=settings.warmup,
            )
            update(model, optimizer, lr, settings.clip)
            steps += 1
            if rank == 0 and time.monotonic() - saved_s >= every_s:
                save_state(model, optimizer, steps, out / CHECKPOINT_FILE)
                saved_s = time.monotonic()
            if settings.pace:
                time.sleep(max(0.0, started + settings.pace - time.monotonic()))
            line = {"incarnation": life, "step": steps, "unix_s": time.time(), "loss": loss / learners}
            record.write(dumps(line) + "\n")

        # --- results ------------------------------------------------------------------------------
        final_loss = shared_held_out_loss(model, validation, device)
    if rank == 0:
        spec: dict[str, Any] = {
            "format": 1,
            "sync": settings.sync_spec().model_dump(),
            "tensors": [tensor.model_dump() for tensor in whole_tensors(model, settings)],
            "trainer": agreed,
        }
        save(model, spec, out / "checkpoint")
        tokens = steps * step_tokens
        result = {"global_val_loss": final_loss, "steps": steps, "tokens": tokens, "restarts": int(life)}
        temporary = out / f".{RESULT_FILE}"
        temporary.write_text(dumps(result, indent=1))
        temporary.replace(out / RESULT_FILE)
