"""Whole training runs of which each party has a line of its own (`packets`). Linux, as root.

A run joins on lines that carry what a round asks of them, where its own carry less. When all learners train, and each
fragment was merged, lines are the cell's. After a while, in which intervals settle, it is measured for a time. Then all
parties are killed at once, and the held-out loss is that of the globals as the heads name them.
"""

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import which
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.settings import EvaluatorProcess
from diloco.pipeline.view.status import Status
from diloco.pipeline.view.status_reader import read_status
from diloco.workers.exchange.evaluating import Evaluating
from diloco.workers.exchange.reaching import read_run
from diloco.workers.trainer.evaluator import built_in
from diloco.workers.trainer.models.sizes import SIZES
from diloco_studies.bench.end_to_end import PYTHONPATH, Process
from diloco_studies.bench.machine import cpu_s
from diloco_studies.bench.slow import packets, probe
from diloco_studies.bench.slow.line_cells import FRAGMENTS, INTERVAL, LEARNERS, Cell, forecast, line_rates, row

LOOK_S = 0.2
START_S = 300.0
"""For all learners to train."""
IP = which("ip") or ""
PREFIX = "diloco-line-"
NETWORK = os.getpid() % 256
"""Two benches at once meet by chance only; the later one says so, and ends."""
HOST = packets.place(NETWORK, 0).host
JOINING_RATE = 1.0
"""Of the lines while a run joins, at least."""


MODEL = "small"
PACE_S = 0.2
"""Of a step at least."""
BATCH, SEQ_LEN = 1, 64
EVAL_TOKENS = 16_384
PARAMS = SIZES[MODEL].parameters()
ROUND_S = INTERVAL * PACE_S
"""As planned."""
STEP_TOKENS = BATCH * SEQ_LEN
"""Of one learner."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of each run."""

    settle_s: float
    """On the cell's lines, before it is measured."""
    for_s: float
    """Measured."""


def need_lines() -> None:
    """Whether such lines can be made here.

    Raises:
        UsageError: no; why.
    """
    if sys.platform != "linux" or os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        raise UsageError(
            "`diloco bench lines` needs Linux, root and /dev/net/tun: it makes network namespaces and lines"
        )
    if not IP:
        raise UsageError("`diloco bench lines` needs the command `ip` (Debian: iproute2)")


@contextmanager
def namespaces(parties: Sequence[str]) -> Iterator[dict[str, str]]:
    """Party -> a network namespace of its own; those of benches that were killed go too."""
    there = subprocess.run([IP, "netns", "list"], check=True, capture_output=True, text=True).stdout.split()
    for name in there:
        if name.startswith(PREFIX) and not Path(f"/proc/{name.removeprefix(PREFIX).partition('-')[0]}").exists():
            subprocess.run([IP, "netns", "del", name], check=False)
    made = {party: f"{PREFIX}{os.getpid()}-{party}" for party in parties}
    with ExitStack() as stack:
        for name in made.values():
            subprocess.run([IP, "netns", "add", name], check=True)
            stack.callback(subprocess.run, [IP, "netns", "del", name], check=False)
        yield made


@dataclass(slots=True)
class Watched:
    """What is seen of a run while it is measured."""

    ages_s: list[float] = field(default_factory=list)
    """Of each learner's last report, at each look, before the next one came."""
    silent: int = 0
    """Looks at which a learner counted as dead."""
    looks: int = 0
    warnings: set[str] = field(default_factory=set)


class Run:
    """One cell's processes, within a `with` block."""

    def __init__(self, cell: Cell, times: Times, folder: Path) -> None:
        self._cell, self._times, self._folder = cell, times, folder
        self._stack = ExitStack()
        self.run = f"lines-{secrets.token_hex(4)}"
        self.parties: dict[str, Process] = {}

    def __enter__(self) -> "Run":
        with ExitStack() as stack:
            names = [*(f"learner-{number}" for number in range(LEARNERS)), "syncer", "evaluator"]
            inside = stack.enter_context(namespaces(names))
            environ = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
            environ |= {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
            arguments = ["-m", "diloco_studies.bench.slow.packets", str(NETWORK), dumps(inside)]
            self.lines = Process("packets", arguments, self._folder, environ, True)
            stack.callback(self.lines.end)
            self.lines.hear()
            for name, namespace in inside.items():
                place = packets.place(NETWORK, names.index(name))
                for at, to, by in ((), place.address, place.ours), (("-n", namespace), place.host, place.theirs):
                    route = [IP, *at, "route", "replace", to, "dev", by, "congctl", self._cell.congestion]
                    subprocess.run(route, check=True)
            self.shape(JOINING_RATE)
            password = secrets.token_hex(16)
            server = EmbeddedRedis(port=0, host=HOST, password=password, dies_with_us=True)
            stack.enter_context(server)
            self.redis_pid = server.pid
            self.url = f"{server.url}?password={password}"
            environ |= {
                "DILOCO_REDIS_URL": f"redis://:{password}@{HOST}:{server.port}",
                "DILOCO_FIRST_INTERVAL": "0",
                "DILOCO_EVAL_EVERY": f"{ROUND_S}",
                "DILOCO_EVAL_TOKENS": "1024",
            }

            def start(name: str, *own: str, talks: bool = False, by: Sequence[str] = ()) -> Process:
                within = (IP, "netns", "exec", inside[name])
                process = Process(
                    f"{name}{'-probe' if by else ''}",
                    by or ["-m", "diloco", *own],
                    self._folder,
                    environ,
                    talks,
                    within,
                )
                stack.callback(process.end)
                return process

            self.parties["syncer"] = start("syncer", "syncer", "--run", self.run, "--http-port", "0")
            for name in names[:LEARNERS]:
                self.parties[name] = start(name, "learner", "--learner-id", name, *self._learning())
            self.parties["evaluator"] = start("evaluator", "evaluator", "--run", self.run)
            self._probes = {}
            for name in ("learner-0", "syncer"):
                probing = ["-P", probe.__file__, HOST, str(server.port)]
                self._probes[name] = start(name, talks=True, by=probing)
                self._probes[name].say(password)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _learning(self) -> list[str]:
        times, cell = self._times, self._cell
        steps = LEARNERS * (times.settle_s + 2 * times.for_s) / PACE_S
        given = {
            "run": self.run,
            "model": MODEL,
            "batch": BATCH,
            "seq-len": SEQ_LEN,
            "pace": f"{PACE_S}s",
            "threads": 1,
            "codec": cell.codec,
            "global-codec": cell.global_codec,
            "tokens": round(steps * STEP_TOKENS),
        }
        return [text for name, value in given.items() for text in (f"--{name}", str(value))]

    def shape(self, least_rate: float = 0.0) -> dict[str, float]:
        """From now on lines are the cell's, but for their rate if it is less; what they carry, bytes a second."""
        cell = self._cell
        rates = line_rates(replace(cell, rate=max(cell.rate, least_rate)), PARAMS, ROUND_S)
        rest = (cell.latency_ms / 2000, cell.jitter_ms / 1000, cell.loss)
        self.lines.say(dumps({"shape": {name: packets.Shape(rate, *rest) for name, rate in rates.items()}}))
        return rates

    def counts(self) -> dict[str, Any]:
        """What lines have carried."""
        self.lines.say(dumps({"count": True}))
        return self.lines.hear()

    def cpu_s(self) -> dict[str, float]:
        """CPU time of each process, s."""
        found = {name: cpu_s(process.pid) for name, process in self.parties.items()}
        assert self.redis_pid is not None  # noqa: S101  # it runs
        return found | {"redis": cpu_s(self.redis_pid), "packets": cpu_s(self.lines.pid)}

    def calls_s(self, since: float) -> dict[str, list[float]]:
        """What small calls took on the lines of a learner and the syncer, those that began since then."""
        found = {}
        for name, one in self._probes.items():
            one.say("")
            found[name] = [took_s for at, took_s in one.rest() if at >= since]
        return found

    def kill(self) -> None:
        """All parties at once."""
        for process in self.parties.values():
            process.end()

    def log_of(self, name: str) -> str:
        """What it wrote."""
        return (self._folder / f"{name}.log").read_text(errors="replace")


def measure(cell: Cell, times: Times) -> dict[str, Any]:
    """A row of the table of results."""
    size = SIZES[MODEL]
    shape = size.width, size.layers
    predicted = forecast(cell, PARAMS, PACE_S, STEP_TOKENS, *shape)
    with TemporaryDirectory(prefix="diloco_lines_") as folder, Run(cell, times, Path(folder)) as run:
        found = asyncio.run(_measured(run, cell, times))
    return row(cell, predicted, found)


async def _begun(run: Run, bus: Bus) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for process in run.parties.values():
            process.check()
        status = await read_status(bus, LoopClock())
        steps = [one["step"] for one in status["learners"]]
        if len(steps) == LEARNERS and all(steps) and all(one["version"] for one in status["fragments"]):
            return
        await asyncio.sleep(LOOK_S)
    raise UsageError(f"no merge within {START_S:g} s: {run.log_of('learner-0')[-2000:]}")


async def _watch(bus: Bus, for_s: float, watched: Watched) -> None:
    until, last = time.monotonic() + for_s, dict[str, float]()
    while time.monotonic() < until:
        status = await read_status(bus, LoopClock())
        watched.looks += 1
        watched.warnings.update(status["warnings"])
        for one in status["learners"]:
            age_s, before = one["age_s"], last.get(one["id"], 0.0)
            if age_s < before:
                watched.ages_s.append(before)
            last[one["id"]] = age_s
            watched.silent += not one["live"]
        await asyncio.sleep(LOOK_S)
    watched.ages_s += last.values()


async def _measured(run: Run, cell: Cell, times: Times) -> dict[str, Any]:
    watched = Watched()
    async with open_bus(run.url, run.run) as bus:
        await _begun(run, bus)
        rates = run.shape()
        await _watch(bus, times.settle_s, watched)
        began, before, carried, used = time.monotonic(), await read_status(bus, LoopClock()), run.counts(), run.cpu_s()
        await _watch(bus, times.for_s, watched)
        ended, after, used_after = time.monotonic(), await read_status(bus, LoopClock()), run.cpu_s()
        carried_after = run.counts()
        run.kill()
        calls = run.calls_s(began)
        spec = await read_run(bus)
        assert spec is not None  # noqa: S101  # it has begun
        settings = EvaluatorProcess(eval_tokens=EVAL_TOKENS)
        loss = await Evaluating(spec, built_in(spec, settings), 0.0).measure(bus)
    took_s = ended - began
    cpu = {name: round((used_after[name] - used[name]) / took_s, 3) for name in used}
    bytes_ = {
        name: {way: carried_after[name][way]["carried_bytes"] - carried[name][way]["carried_bytes"] for way in line}
        for name, line in carried.items()
    }
    return _figures(before, after, took_s) | {
        "bytes_a_token": _bytes_a_token(before, after, bytes_),
        **{f"busy_{name}": round(max(both.values()) / took_s / rates[name], 3) for name, both in bytes_.items()},
        **{
            f"call_{name}_{what}_s": round(of(some), 3)
            for name, some in calls.items()
            if some
            for what, of in (("median", median), ("most", max))
        },
        "report_age_most_s": round(max(watched.ages_s, default=0.0), 2),
        "silent_share": round(watched.silent / max(1, watched.looks) / LEARNERS, 3),
        "leases_lost": run.log_of("syncer").count("lease_lost"),
        "bus_errors": sum(run.log_of(name).count("bus_unavailable") for name in run.parties),
        "held_out_loss": loss,
        **{f"cores_{name}": one for name, one in cpu.items()},
        "warnings": "; ".join(sorted(watched.warnings))[:300],
    }


def _tokens(status: Status) -> dict[str, float]:
    lost = status["tokens_lost"]
    return {
        "trained": status["tokens"],
        "merged": status["merged_tokens"],
        "overwritten": lost["overwritten"],
        "rejected": lost["rejected"],
    }


def _bytes_a_token(before: Status, after: Status, carried: Mapping[str, Mapping[str, int]]) -> float:
    """Of the learners' lines, both directions, headers and repeated packets included."""
    tokens = after["tokens"] - before["tokens"]
    return round(sum(sum(carried[name].values()) for name in carried if name.startswith("learner")) / max(1, tokens), 1)


def _figures(before: Status, after: Status, took_s: float) -> dict[str, Any]:
    """What the status says of the time between two looks."""
    first, last = _tokens(before), _tokens(after)
    did = {name: last[name] - first[name] for name in first}
    decided = did["merged"] + did["overwritten"] + did["rejected"]
    steps = {one["id"]: one["step"] for one in before["learners"]}
    made = [one["step"] - steps.get(one["id"], 0) for one in after["learners"]]
    versions = sum(one["version"] for one in after["fragments"]) - sum(one["version"] for one in before["fragments"])
    refused = sum(after["refused"].values()) - sum(before["refused"].values())
    return {
        "seconds": round(took_s, 1),
        "utilisation": round(mean(made) * PACE_S / took_s, 3),
        "merged_share": round(did["merged"] / decided, 3) if decided else None,
        "steps_a_merge": round(mean(made) * FRAGMENTS / versions, 1) if versions else None,
        "interval": round(mean(one["interval"] for one in after["fragments"]), 1),
        "merge_s": round(mean(one["window"]["merge_s"] for one in after["fragments"]), 3),
        "outer_s": round(mean(one["window"]["outer_s"] for one in after["fragments"]), 4),
        "pull_s": round(mean(one.get("pull_s", 0.0) for one in after["learners"]), 3),
        "refused": refused,
        "trained_tokens": did["trained"],
    }
