"""The baseline: data-parallel training of the same model, text, optimizer and schedule.

Gradients are averaged over all ranks at every step. So one step's batch is N times a learner's, and every rank waits
for the slowest, which the decoupled method avoids. One all-reduce carries the gradients and the few numbers on
which the ranks must agree (loss, stop, report, evaluate).
"""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.torch
import structlog
import torch
import torch.distributed as dist
from torch import nn

from diloco.pipeline.ema import Ema
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.files.sums import write_sums
from diloco.pipeline.settings import RankProcess
from diloco.workers.parameters import described
from diloco.workers.schedule import learning_rate
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.tokenized import open_for
from diloco.workers.trainer.data.tokens import Tokens
from diloco.workers.trainer.models.hf_config import read_hf
from diloco.workers.trainer.models.named import build_model
from diloco.workers.trainer.precision import training_forward
from diloco.workers.trainer.recipe import (
    StopFlag,
    TrainerSpec,
    add_gradients,
    choose_device,
    held_out_loss,
    make_optimizers,
    read_batch,
    trainer_spec,
    update,
    use_threads,
)

REPORT_EVERY_S = 1.0
# This is also the longest that an all-reduce may take: when one rank dies, the others end after it. The baseline has no
# recovery; that is the method's weakness.
CONNECT_TIMEOUT = timedelta(seconds=60)

SMOOTHING = 0.9

log = structlog.get_logger()


class GradientMean:
    """One flat float32 buffer for all gradients and `extra` numbers, summed over the ranks in one all-reduce."""

    def __init__(self, model: nn.Module, learners: int, extra: int) -> None:
        self._tensors = [p for p in model.parameters() if p.requires_grad]
        self._learners = learners
        size = sum(p.numel() for p in self._tensors)
        self._flat = torch.zeros(size + extra, device="cpu")
        self._views = []
        start = 0
        for tensor in self._tensors:
            self._views.append(self._flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        self._extra = self._flat[size:]
        self.blocked_s = 0.0

    def reduce(self, extra: list[float]) -> list[float]:
        """Replace `.grad` by its mean over the ranks; return the sums of the extra numbers."""
        for view, tensor in zip(self._views, self._tensors, strict=True):
            view.copy_(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor))
        self._extra.copy_(torch.tensor(extra, device="cpu"))
        began = time.perf_counter()
        dist.all_reduce(self._flat)
        self.blocked_s += time.perf_counter() - began
        sums: list[float] = self._extra.tolist()
        self._flat.div_(self._learners)
        for view, tensor in zip(self._views, self._tensors, strict=True):
            if tensor.grad is not None:
                tensor.grad.copy_(view)
        return sums


def block_order(count: int, rank: int, learners: int) -> Iterator[tuple[int, int]]:
    """Yield every `learners`-th block of the endless sequence of epochs, starting with block `rank`."""
    position = rank
    while True:
        yield divmod(position, count)
        position += learners


def gather(row: list[float]) -> list[list[float]]:
    """Return every rank's row of numbers on every rank, in rank order."""
    mine = torch.tensor(row, dtype=torch.float64, device="cpu")
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [list(found.tolist()) for found in rows]


@contextmanager
def process_group(learners: int, rank: int) -> Iterator[None]:
    """Open the process group of all ranks (MASTER_ADDR and MASTER_PORT from the environment).

    Raises:
        UsageError: a variable is missing.
    """
    if missing := {"MASTER_ADDR", "MASTER_PORT"} - set(os.environ):
        raise UsageError(f"{min(missing)} is not set: `diloco run --method data-parallel` sets it for its ranks")
    dist.init_process_group("gloo", rank=rank, world_size=learners, timeout=CONNECT_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save(model: nn.Module, spec: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint folder that `diloco sample` and `diloco export` can read."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().float().cpu().contiguous() for name, p in model.named_parameters()}
    safetensors.torch.save_file(tensors, folder / "globals.safetensors")
    (folder / "state.json").write_text(dumps({"format": 1, "spec": spec}, indent=1))
    write_sums(folder)


def shared_held_out_loss(model: nn.Module, validation: npt.NDArray[np.uint8], device: torch.device) -> float:
    """Return the held-out loss of validation blocks (N, T + 1), of which each rank measures a share."""
    mine = validation[dist.get_rank() :: dist.get_world_size()]
    share = held_out_loss(model, mine, device) * len(mine) if len(mine) else 0.0
    return sum(row[0] for row in gather([share])) / len(validation)


def append_progress(
    out: Path, tokens: int, elapsed_s: float, loss: float, val_loss: float | None, rows: list[list[float]]
) -> None:
    """Append one line of progress, at rank 0 only.

    Each of `rows` holds a rank's step, tokens, tokens per second, loss and step time.
    """
    if dist.get_rank() != 0:
        return
    names = ("step", "tokens", "tokens_per_s", "loss", "step_s")
    learners = [learner_row(rank, names, row) for rank, row in enumerate(rows)]
    line = {"tokens": tokens, "elapsed_s": elapsed_s, "loss": loss, "val_loss": val_loss, "learners": learners}
    with (out / "progress.jsonl").open("a") as file:
        file.write(dumps(line) + "\n")


def learner_row(rank: int, names: Sequence[str], row: Sequence[float]) -> dict[str, str | int | float]:
    """Return a rank's numbers by name; the first two are integers."""
    counted = [int(value) if number < 2 else value for number, value in enumerate(row)]
    return {"id": f"learner-{rank}", **dict(zip(names, counted, strict=True))}


class Parts(NamedTuple):
    """The objects that a rank trains with."""

    device: torch.device
    agreed: TrainerSpec
    """The trainer's part of a spec, made like a learner's."""
    blocks: Blocks
    model: nn.Module
    forward: nn.Module
    """The module to call in training, in the model's place."""
    optimizers: list[torch.optim.Optimizer]
    validation: Tokens
    """Held-out blocks (N, T + 1)."""


def parts_of(settings: RankProcess) -> Parts:
    """Make a rank's parts in the same way as the trainer does.

    Raises:
        UsageError: there is no such model, text or device.
    """
    device = choose_device(settings.device)
    use_threads(settings.threads or 1)
    named = read_hf(settings.model)
    text = open_for(settings.data, named, settings.seq_len)
    model = build_model(settings, named, text).to(device)
    return Parts(
        device=device,
        agreed=trainer_spec(settings, text, named),
        blocks=Blocks(text.train, settings.seq_len, settings.seed),
        model=model,
        forward=training_forward(model, device, settings),
        optimizers=make_optimizers(model.parameters(), settings.lr, settings.weight_decay),
        validation=Blocks(text.validation, settings.seq_len).spread(settings.eval_tokens),
    )


def run_rank(settings: RankProcess, out: Path, learners: int, rank: int) -> int:
    """Train as one rank of the baseline; return the exit status.

    Rank 0 appends to `out`/progress.jsonl and, at the end, writes `out`/checkpoint and `out`/result.json.

    Args:
        settings: the settings of a learner and the evaluator; `tokens` is the budget of all ranks together.
        out: an existing folder.
        learners: number of ranks.
        rank: 0..learners-1.

    Raises:
        UsageError: there is no such model, text or device, or the other ranks' address is not given.
    """
    stop = StopFlag()

    device, agreed, blocks, model, forward, optimizers, validation = parts_of(settings)
    spec = {
        "format": 1,
        "sync": settings.sync_spec().model_dump(),
        "tensors": [tensor.model_dump() for tensor in described(model).whole_tensors(settings)],
        "trainer": agreed,
    }
    order = block_order(blocks.count, rank, learners)
    mean = GradientMean(model, learners, extra=4)
    step_tokens = settings.batch * settings.accumulate * settings.seq_len

    with process_group(learners, rank):
        stop.training = True
        # --- train ---------------------------------------------------------------------------------
        began = reported = evaluated = time.perf_counter()
        started_unix_s = time.time()
        steps = tokens = 0
        loss = step_s = 0.0
        smoothed = Ema(SMOOTHING)
        times: list[float] = []
        while tokens < settings.tokens:
            started = time.perf_counter()
            batches = (read_batch(blocks, order, settings.batch, device) for _ in range(settings.accumulate))
            own_loss = add_gradients(forward, batches, settings.accumulate).item()
            report = rank == 0 and started - reported >= REPORT_EVERY_S
            measure = rank == 0 and started - evaluated >= settings.eval_every
            loss_sum, stops, reports, measures = mean.reduce([own_loss, stop.asked, report, measure])
            lr = learning_rate(
                tokens / settings.tokens,
                steps,
                peak=settings.lr,
                min_ratio=settings.min_lr_ratio,
                warmup=settings.warmup,
            )
            update(model, optimizers, lr, settings.clip)
            steps += 1
            tokens += step_tokens * learners
            loss = loss_sum / learners
            if settings.pace:
                time.sleep(max(0.0, started + settings.pace - time.perf_counter()))
            took = time.perf_counter() - started
            times.append(took)
            step_s = smoothed.observe(took)
            if reports or measures:
                val_loss = shared_held_out_loss(model, validation, device) if measures else None
                rows = gather([steps, steps * step_tokens, step_tokens / step_s, own_loss, step_s])
                append_progress(out, tokens, time.perf_counter() - began, loss, val_loss, rows)
                reported = time.perf_counter()
                evaluated = reported if measures else evaluated
            if stops:
                break

        # --- results -------------------------------------------------------------------------------
        wall_s = time.perf_counter() - began
        final_loss = shared_held_out_loss(model, validation, device)
        rows = gather([steps, steps * step_tokens, step_tokens / step_s, own_loss, step_s])
        append_progress(out, tokens, wall_s, loss, final_loss, rows)
        rows = gather(
            [steps, steps * step_tokens, steps * step_tokens / wall_s, statistics.median(times), mean.blocked_s]
        )
    if rank == 0:
        names = ("steps", "tokens", "tokens_per_s", "step_s_median", "blocked_s")
        save(model, spec, out / "checkpoint")
        result = {
            "global_val_loss": final_loss,
            "tokens": tokens,
            "started_unix_s": started_unix_s,
            "wall_s": wall_s,
            "device": str(device),  # the same for every rank: all are on this machine
            "learners": [learner_row(number, names, row) for number, row in enumerate(rows)],
        }
        (out / "result.json").write_text(dumps(result, indent=1))
        log.info("training_ended", steps=steps, tokens=tokens, val_loss=round(final_loss, 4))
    return 0
