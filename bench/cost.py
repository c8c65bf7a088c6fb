"""What a learner costs a training loop by wall clock, all its threads included: the same loop with it and without it.

Two processes take turns on one core, block by block, of which one has a learner; the other one is stopped meanwhile.
The syncer and Redis have the other cores. On one core the learner's exchange thread takes from the training thread all
that it computes, not only the interpreter's lock: with cores to spare it costs less.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from pipeline import logs
from pipeline.settings import SyncSettings
from pipeline.strict_json import dumps
from workers.learner import Learner
from workers.models.gpt import build

from .end_to_end import ROOT, Fleet, Process, server
from .figures import Spread, progress, spread
from .machine import cores
from .stepping import MODELS as MODELS

KINDS = "python", "torch"
"""What the loop does: hold the interpreter's lock all the time, or leave it in operators of half a millisecond."""
SIDE = 192
CALIBRATION_S = 0.3
"""Of each of five trials: the fastest says how much work a step is."""


@dataclass(frozen=True, slots=True)
class Loops:
    """What is measured."""

    model: str = "tiny"
    interval: int = 24
    fragments: int = 8
    wire: str = "bf16"
    steps_ms: tuple[float, ...] = (1.0, 10.0, 100.0)
    pairs: int = 15
    block_s: float = 1.0
    """Of one process at a time."""


def work_of(kind: str) -> Callable[[int], None]:
    """So many units of work."""
    if kind == "python":

        def compute(units: int) -> None:
            value = 1
            for _ in range(100 * units):
                value = (31 * value + 7) % 1000003
    else:
        one, out = torch.rand(SIDE, SIDE), torch.empty(SIDE, SIDE)

        def compute(units: int) -> None:
            for _ in range(units):
                torch.mm(one, one, out=out)

    return compute


def _units_a_ms(kind: str) -> float:
    compute, best = work_of(kind), 0.0
    for _ in range(5):
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < CALIBRATION_S:
            compute(10)
            done += 10
        best = max(best, done / (1000 * (time.perf_counter() - began)))
    return best


def measure(given: Loops, console: Console, redis_url: str | None) -> dict[str, dict[str, Spread]]:
    """Per kind and length of a step: what the learner adds, and what it reports as blocked, as shares of the loop."""
    usable = sorted(os.sched_getaffinity(0)) if cores() > 1 and hasattr(os, "sched_getaffinity") else []
    if usable:
        os.sched_setaffinity(0, usable[:1])
    try:
        torch.set_num_threads(1)
        units = {kind: _units_a_ms(kind) for kind in KINDS}
        found: dict[str, dict[str, Spread]] = {}
        with ExitStack() as stack, progress(console) as bar:
            if usable:
                os.sched_setaffinity(0, usable[1:])
            url = stack.enter_context(server(redis_url, False))
            fleet = stack.enter_context(Fleet(None, url))
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="diloco_bench_")))
            cases = [(kind, step_ms) for kind in KINDS for step_ms in given.steps_ms]
            task = bar.add_task("training", total=2 * given.pairs)
            if usable:
                os.sched_setaffinity(0, usable[:1])  # the loops begin with it
            loops, environ = [], {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            for name in ("with", "without"):
                told = {**asdict(given), "run": fleet.run, "url": url, "learns": name == "with"}
                loop = Process(name, ["-m", "bench.cost", dumps(told)], folder, environ, True)
                stack.callback(loop.end)
                loop.hear()
                os.kill(loop.pid, signal.SIGSTOP)
                loops.append(loop)
            for kind, step_ms in cases:
                bar.reset(task, description=f"{kind}, {step_ms:g} ms")
                steps = max(1, round(1000 * given.block_s / step_ms))
                line = f"{kind} {max(1, round(units[kind] * step_ms))} {steps}"
                turns: list[Sequence[dict[str, float]]] = []
                for turn in range(given.pairs + 1):
                    one = {}
                    for number in (0, 1) if turn % 2 else (1, 0):
                        os.kill(loops[number].pid, signal.SIGCONT)
                        loops[number].say(line)
                        one[number] = loops[number].hear()
                        os.kill(loops[number].pid, signal.SIGSTOP)
                        bar.advance(task)
                    if turn:  # the first one starts all up
                        turns.append((one[0], one[1]))
                found[f"{kind}, {step_ms:g} ms"] = _shares(turns, steps)
    finally:
        if usable:
            os.sched_setaffinity(0, usable)
    return found


def _shares(turns: Sequence[Sequence[dict[str, float]]], steps: int) -> dict[str, Spread]:
    return {
        "added_share": spread(a["wall_s"] / b["wall_s"] - 1 for a, b in turns),
        "blocked_share": spread(a["blocked_s"] / b["wall_s"] for a, b in turns),
        "cpu_share": spread(a["cpu_s"] / b["cpu_s"] - 1 for a, b in turns),
        "deltas_per_s": spread(a["deltas"] / a["wall_s"] for a, _ in turns),
        "with_ms": spread(1000 * a["wall_s"] / steps for a, _ in turns),
        "without_ms": spread(1000 * b["wall_s"] / steps for _, b in turns),
    }


def main() -> None:
    """Run blocks of steps until stdin ends."""
    logs.configure("warning")
    given: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model: Any = build(given["model"], 0)
    parameters = list(model.parameters())
    sync = SyncSettings(
        fragments=given["fragments"],
        sync_interval=given["interval"],
        codec=given["wire"],
        first_interval=0,
        tokens=2**60,
    )
    learner = Learner(model, None, run=given["run"], redis_url=given["url"], learner_id="bench", sync=sync)
    with learner if given["learns"] else nullcontext():
        print(dumps({"joined": True}), flush=True)
        for line in sys.stdin:
            kind, units, steps = line.split()
            print(dumps(_block(work_of(kind), int(units), int(steps), parameters, learner)), flush=True)


@torch.no_grad()
def _block(
    compute: Callable[[int], None], units: int, steps: int, parameters: list[torch.Tensor], learner: Learner
) -> dict[str, float]:
    rounds, blocked_s = learner._rounds, learner.times.blocked_s
    deltas = 0 if rounds is None else rounds._serial
    cpu_s, began = time.process_time(), time.perf_counter()
    for _ in range(steps):
        compute(units)
        torch._foreach_add_(parameters, 1e-6)
        if rounds is not None:
            learner.step(tokens=1)
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_s,
        "blocked_s": learner.times.blocked_s - blocked_s,
        "deltas": 0 if rounds is None else rounds._serial - deltas,
    }


if __name__ == "__main__":
    main()
