"""What `learner.step()` adds to a training step: one learner, nothing else on the cores that train.

Blocks of one sync interval with the learner and without it take turns; in those without, its exchange thread idles.
With two cores or more the training threads have all but the last: exchange thread, syncer and Redis share that one.
"""

import math
import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console

from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.settings import LearnerSettings, SyncSettings
from diloco.workers.learner import Learner
from diloco.workers.trainer.models.gpt import build
from diloco.workers.trainer.models.sizes import SIZES
from diloco.workers.trainer.precision import training_forward
from diloco.workers.trainer.recipe import add_gradients, choose_device, make_optimizers, update
from diloco_studies.bench.end_to_end import Fleet, server
from diloco_studies.bench.figures import Spread, progress, spread
from diloco_studies.bench.machine import need_memory

MODELS = tuple(SIZES)
LR = 1e-4


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and how it is synchronised."""

    model: str = "large"
    interval: int = 24
    fragments: int = 8
    wire: str = "bf16"
    tokens: int = 128
    """In a sequence."""
    blocks: int = 3
    """Of `interval` steps, with the learner and without it each."""
    compile: bool = False
    batch: int = 1
    """Sequences in a step."""
    device: str = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    checkpoint_activations: bool = False

    def settings(self) -> LearnerSettings:
        """As a learner is told."""
        names = ("compile", "device", "precision", "checkpoint_activations")
        return LearnerSettings(**{name: getattr(self, name) for name in names})


def measure(given: Training, console: Console, redis_url: str | None) -> dict[str, Spread]:
    """Seconds of a step with the learner and without, and what the library's own clock says."""
    params = SIZES[given.model].parameters()
    need_memory(4.0 * params * 16, f"training {params / 1e6:.0f}M parameters")
    apart = usable_cores() > 1 and hasattr(os, "sched_setaffinity")
    usable = sorted(os.sched_getaffinity(0)) if apart else []
    training, rest = usable[:-1], usable[-1:]
    torch.set_num_threads(max(1, len(training)))
    if apart:
        os.sched_setaffinity(0, rest)  # what is started from here on stays there
    try:
        with server(redis_url, False) as url, Fleet(None, url) as fleet:
            sync = SyncSettings(
                fragments=given.fragments,
                sync_interval=given.interval,
                codec=given.wire,
                first_interval=0,
                tokens=2**60,
            )
            device = choose_device(given.device)
            model: Any = build(given.model, 0).to(device)
            optimizers = make_optimizers(model.parameters(), LR, 0.1)
            forward = training_forward(model, device, given.settings())
            learner = Learner(model, optimizers, run=fleet.run, redis_url=url, learner_id="bench", sync=sync)
            with learner:
                if apart:
                    os.sched_setaffinity(0, training)  # this thread alone; those of torch begin with it
                report = _blocks(given, console, forward, optimizers, learner)
            if device.type == "cuda":
                report["device_gb"] = spread([torch.cuda.max_memory_allocated() / 1e9])
            return report
    finally:
        if apart:
            os.sched_setaffinity(0, usable)


def _blocks(given: Training, console: Console, forward: Any, optimizers: Any, learner: Learner) -> dict[str, Spread]:
    data = torch.randint(0, 256, (given.batch, given.tokens + 1), generator=torch.Generator().manual_seed(0))
    data = data.to(learner.device)

    def train() -> None:
        add_gradients(forward, [data], 1)
        update(learner.model, optimizers, LR, math.inf)

    def wait() -> None:
        if learner.device.type == "cuda":
            torch.cuda.synchronize()

    found: dict[str, list[float]] = {"with_s": [], "without_s": [], "step_call_ms": []}
    calls: list[float] = []
    for _ in range(2):
        train()
    with progress(console) as bar:
        task = bar.add_task("training", total=2 * given.blocks * given.interval + given.interval)
        for block in range(2 * given.blocks + 1):
            own = block % 2 == 0
            wait()
            began = time.perf_counter()
            for _ in range(given.interval):
                train()
                if own:
                    called = time.perf_counter()
                    learner.step(tokens=given.batch * given.tokens)
                    calls.append(time.perf_counter() - called)
                bar.advance(task)
            wait()
            took = (time.perf_counter() - began) / given.interval
            if block:  # the first one starts all up
                found["with_s" if own else "without_s"].append(took)
                if own:
                    found["step_call_ms"] += [1000 * one for one in calls]
            calls.clear()
    report = {name: spread(values) for name, values in found.items()}
    means = [sum(found["step_call_ms"]) / len(found["step_call_ms"]) / 1000]
    report["blocked_share"] = spread(mean / without for mean in means for without in found["without_s"])
    pairs = zip(found["with_s"], found["without_s"], strict=True)
    report["added_share"] = spread(a / b - 1 for a, b in pairs)
    tokens = given.batch * given.tokens
    for way in ("with", "without"):
        report[f"tokens_per_s_{way}"] = spread(tokens / took for took in found[f"{way}_s"])
    return report
