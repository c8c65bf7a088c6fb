"""What a learner costs a training loop by wall clock, all its threads included: the same loop with it and without it.

A joined process forks: its copy has the same memory in the same places, and no exchange thread. The two take turns,
block by block, and the one whose turn it is not is stopped. Once on one core, where all that the exchange thread
computes is taken from training; once with a core to spare, where the interpreter's lock is what they share. The
syncer and Redis have the other cores.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
from rich.console import Console

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.process import logs
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.settings import SyncSettings
from diloco.workers.learner import Learner
from diloco.workers.trainer.models.gpt import build
from diloco.workers.training import Training
from diloco_studies.bench.end_to_end import PYTHONPATH, Fleet, Process, server
from diloco_studies.bench.figures import Spread, progress, spread
from diloco_studies.bench.stepping import MODELS as MODELS

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
            for _ in range(100 * units):  # small integers: larger ones are allocated, and how fast, is a matter of luck
                value = (value + 7) & 127
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
    """Per kind, length of a step and place: what the learner adds, and what it reports as blocked, as shares."""
    usable = sorted(os.sched_getaffinity(0)) if usable_cores() > 1 and hasattr(os, "sched_getaffinity") else []
    places = {"one core": usable[:1], "all cores": usable} if usable else {"all cores": []}
    found: dict[str, dict[str, Spread]] = {}
    with ExitStack() as stack, progress(console) as bar:
        if usable:
            stack.callback(os.sched_setaffinity, 0, usable)
            os.sched_setaffinity(0, usable[:1])
        torch.set_num_threads(1)
        units = {kind: _units_a_ms(kind) for kind in KINDS}
        if usable:
            os.sched_setaffinity(0, usable[1:])
        url = stack.enter_context(server(redis_url, False))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="diloco_bench_")))
        task = bar.add_task("joining", total=2 * (given.pairs + 1))
        for number, (place, its) in enumerate(places.items()):
            if usable:
                os.sched_setaffinity(0, usable[1:])
            with Fleet(None, url) as fleet:
                if usable:
                    os.sched_setaffinity(0, its)  # the loop begins with it
                environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
                told = dumps({**asdict(given), "run": fleet.run, "url": url})
                loop = Process(f"loop-{number}", ["-m", "diloco_studies.bench.cost", told], folder, environ, True)
                try:
                    loop.hear()
                    for kind in KINDS:
                        for step_ms in given.steps_ms:
                            bar.reset(task, description=f"{kind}, {step_ms:g} ms, {place}")
                            steps = max(1, round(1000 * given.block_s / step_ms))
                            line = f"{kind} {max(1, round(units[kind] * step_ms))} {steps}"
                            turns = []
                            for turn in range(given.pairs + 1):
                                one = {}
                                for who in ("with", "without") if turn % 2 else ("without", "with"):
                                    loop.say(f"{who} {line}")
                                    one[who] = loop.hear()
                                    bar.advance(task)
                                if turn:  # the first one starts all up
                                    turns.append((one["with"], one["without"]))
                            found[f"{kind}, {step_ms:g} ms, {place}"] = _shares(turns, steps)
                finally:
                    loop.end()
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
    with Learner(model, None, run=given["run"], redis_url=given["url"], learner_id="bench", sync=sync) as learner:
        training = learner.joined.training
        ours, its = Pipe()
        if os.fork() == 0:
            ours.close()
            _alone(its, parameters, training)
        its.close()
        print(dumps({"joined": True}), flush=True)
        for line in sys.stdin:
            who, rest = line.split(maxsplit=1)
            if who == "with":
                told = _block(rest, parameters, training, learner.step)
            else:
                ours.send_bytes(rest.encode())
                told = json.loads(ours.recv_bytes())
            print(dumps(told), flush=True)


def _alone(asked: Connection, parameters: list[torch.Tensor], training: Training) -> NoReturn:
    """The copy: it has the learner's memory and none of its threads; the learner's process is stopped meanwhile."""
    above = os.getppid()
    try:
        while True:
            line = asked.recv_bytes().decode()
            os.kill(above, signal.SIGSTOP)
            try:
                told = _block(line, parameters, training, lambda tokens: None)
            finally:
                os.kill(above, signal.SIGCONT)
            asked.send_bytes(dumps(told).encode())
    except (EOFError, OSError):  # the other one is gone
        pass
    finally:
        os._exit(0)


@torch.no_grad()
def _block(
    line: str, parameters: list[torch.Tensor], training: Training, step: Callable[..., None]
) -> dict[str, float]:
    kind, units, steps = line.split()
    compute, amount, blocked_s = work_of(kind), int(units), training.times.blocked_s
    deltas = training.rounds.deltas
    cpu_s, began = time.process_time(), time.perf_counter()
    for _ in range(int(steps)):
        compute(amount)
        torch._foreach_add_(parameters, 1e-6)
        step(tokens=1)
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_s,
        "blocked_s": training.times.blocked_s - blocked_s,
        "deltas": training.rounds.deltas - deltas,
    }


if __name__ == "__main__":
    main()
