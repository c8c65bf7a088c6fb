"""What a learner of several ranks costs: `python -m diloco_studies.bench.ranks WHAT`.

| WHAT | |
|---|---|
| `stall` | `learner.step()` as a share of a step, mean and maximum, beside a single process |
| `bytes` | bytes on the bus of each rank, as Redis counts them by connection |
| `memory` | resident memory beyond what training has, of the fullest rank |
| `share` | learners in one run, at the default overlap: how much of each is merged, and how much of that stale |
| `kill` | a rank killed: when its learner is down, and the pace of the others |

Processes are of one thread each. All figures of a table come from one call of it.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.fragment import Committed, TapeRecord
from diloco.tape import read_live
from diloco_studies.bench.end_to_end import Fleet, server
from diloco_studies.bench.plain import Plain
from diloco_studies.bench.rank_process import RankTask

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
LIMIT_S = 540.0
WARM_STEPS = 10
Lines = list[dict[str, Any]]


class Ranks:
    """The processes of one learner; what each says is in a file."""

    def __init__(self, told: RankTask, ranks: int, folder: Path) -> None:
        self.told, self._files = told, [folder / f"{told.learner}-{rank}" for rank in range(ranks)]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = [self._start(rank, os.environ | group | {"RANK": str(rank)}) for rank in range(ranks)]

    def _start(self, rank: int, environ: dict[str, str]) -> subprocess.Popen[str]:
        named = f"{self.told.url}?client_name={self.told.learner}-{rank}"
        told = dumps(asdict(self.told) | {"url": named})
        with self._files[rank].open("w") as said, self._files[rank].with_suffix(".log").open("w") as log:
            command = [sys.executable, "-m", "diloco_studies.bench.rank_process", told]
            return subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=said, stderr=log, text=True)

    def said(self, rank: int, name: str) -> Lines:
        """Lines of a rank that have a field."""
        lines = [line for line in self._files[rank].read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [found for line in lines if name in (found := json.loads(line))]

    def steps(self, rank: int = 0) -> Lines:
        """Of a rank, without those in which all begins."""
        return self.said(rank, "t")[WARM_STEPS:]

    def have(self, name: str) -> bool:
        """Whether all have said a line with this field."""
        for rank, process in enumerate(self.processes):
            if process.poll() not in (None, 0):
                raise UsageError(self._files[rank].with_suffix(".log").read_text()[-3000:])
        return all(self.said(rank, name) for rank in range(len(self.processes)))

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.kill()
            process.wait()


class World:
    """A Redis, a syncer, and learners that end with the block."""

    def __init__(self, stack: ExitStack, **sync: Any) -> None:
        self._stack, self._sync = stack, sync
        self.folder = Path(stack.enter_context(TemporaryDirectory(prefix="diloco_bench_")))
        self.url = stack.enter_context(server(None, False))
        self.run = stack.enter_context(Fleet(None, self.url)).run

    def learner(self, kind: str, ranks: int, name: str = "", **told: Any) -> Ranks:
        """Start one."""
        given = {"kind": kind, "learner": name or f"{kind}-{ranks}", "sync": self._sync} | told
        made = Ranks(RankTask(url=self.url, run=self.run, **given), ranks, self.folder)
        self._stack.callback(made.end)
        return made

    def plain(self) -> Plain:
        """A connection of the benchmark's own."""
        return self._stack.enter_context(Plain(self.url))


@contextmanager
def world(**sync: Any) -> Iterator[World]:
    """See `World`."""
    with ExitStack() as stack:
        yield World(stack, tokens=2**60, **sync)


def until(true: Callable[[], object], every_s: float = 0.2) -> None:
    """Wait for it."""
    deadline = time.monotonic() + LIMIT_S
    while not true():
        if time.monotonic() > deadline:
            raise UsageError("it took too long")
        time.sleep(every_s)


def kinds(given: str) -> list[tuple[str, int]]:
    """plain:1,ddp:2 and so on."""
    return [(kind, int(ranks)) for kind, _, ranks in (one.partition(":") for one in given.split(","))]


# --- standing still -----------------------------------------------------------------------------------------


@app.command()
def stall(
    model: Annotated[str, typer.Option()] = "base",
    steps: Annotated[int, typer.Option()] = 120,
    pace_s: Annotated[float, typer.Option(help="Duration of a step; 0: as fast as possible")] = 2.0,
    learners: Annotated[str, typer.Option(help="KIND:RANKS, in turn")] = "plain:1,ddp:2,fsdp:3",
) -> None:
    """`learner.step()` beside the step that it ends."""
    print("| learner | a step | learner.step: mean | at 99 % | maximum | its own CPU time: mean | maximum |")
    print("|---|---|---|---|---|---|---|")
    for kind, ranks in kinds(learners):
        with world(sync_interval=24, codec="bf16", first_interval=0) as here:
            learner = here.learner(kind, ranks, model=model, steps=steps + WARM_STEPS, pace_s=pace_s)
            until(lambda: learner.have("ended"))  # noqa: B023  # called here
            found = [one for rank in range(ranks) for one in learner.steps(rank)]
        step_s = fmean(one["step_s"] for one in found)
        inside, cpu = sorted(one["in_s"] for one in found), [one["cpu_s"] for one in found]
        shares = fmean(inside), inside[int(0.99 * len(inside))], inside[-1], fmean(cpu), max(cpu)
        cells = " | ".join(f"{1000 * one:.2f} ms ({one / step_s:.2%})" for one in shares)
        print(f"| {kind} of {ranks} | {1000 * step_s:.0f} ms | {cells} |", flush=True)


# --- bytes on the bus ---------------------------------------------------------------------------------------


def carried(plain: Plain, seen: dict[str, tuple[str, int, int]]) -> None:
    """Note of each connection that has a name what has come and gone, as Redis has counted it."""
    for line in plain.ask("CLIENT", "LIST").decode().splitlines():
        told = dict(word.partition("=")[::2] for word in line.split(" "))
        if told["name"]:
            seen[told["id"]] = told["name"], int(told["tot-net-in"]), int(told["tot-net-out"])


@app.command("bytes")
def bytes_(
    model: Annotated[str, typer.Option()] = "base",
    steps: Annotated[int, typer.Option()] = 600,
    pace_s: Annotated[float, typer.Option()] = 0.05,
    interval: Annotated[int, typer.Option()] = 12,
    codec: Annotated[str, typer.Option()] = "bf16",
    learners: Annotated[str, typer.Option()] = "fsdp:2,fsdp:3,fsdp:4,fsdp:8",
) -> None:
    """Each rank's, over its share, with the layout as a user gets it. Parameters hardly move: bytes do not mind."""
    print("| ranks | joining: up | down | training, each rank over its share: up | down | MB: up | down |")
    print("|---|---|---|---|---|---|---|")
    for kind, ranks in kinds(learners):
        with world(sync_interval=interval, codec=codec, first_interval=0) as here:
            plain, seen = here.plain(), dict[str, tuple[str, int, int]]()
            learner = here.learner(kind, ranks, model=model, steps=steps, pace_s=pace_s, trains=False)

            def ready(name: str) -> bool:
                carried(plain, seen)  # noqa: B023
                return learner.have(name)  # noqa: B023

            until(lambda: ready("joined"), 0.02)
            joined = shares(seen, ranks)
            until(lambda: ready("ended"))
            ended = shares(seen, ranks)
        rows, totals = [], []
        for way in range(2):
            trained = [b - a for a, b in zip(joined[way], ended[way], strict=True)]
            rows.append((over(joined[way]), over(trained)))
            totals.append(sum(trained) / 1e6)
        cells = [rows[0][0], rows[1][0], rows[0][1], rows[1][1], f"{totals[0]:.0f}", f"{totals[1]:.0f}"]
        print(f"| {kind} of {ranks} | " + " | ".join(cells) + " |", flush=True)


def shares(seen: dict[str, tuple[str, int, int]], ranks: int) -> list[list[int]]:
    """Into Redis and out of it, by rank."""
    sums = [[0] * ranks, [0] * ranks]
    for name, *both in seen.values():
        for way, count in enumerate(both):
            sums[way][int(name.rpartition("-")[2])] += count
    return sums


def over(counts: Sequence[int]) -> str:
    """The least and the most, over the mean."""
    mean = sum(counts) / len(counts)
    return f"{min(counts) / mean:.3f} - {max(counts) / mean:.3f}"


# --- memory -------------------------------------------------------------------------------------------------


@app.command()
def memory(
    models: Annotated[str, typer.Option()] = "base,medium",
    steps: Annotated[int, typer.Option()] = 240,
    pace_s: Annotated[float, typer.Option()] = 0.1,
    interval: Annotated[int, typer.Option()] = 24,
    codec: Annotated[str, typer.Option()] = "bf16",
    learners: Annotated[str, typer.Option()] = "plain:1,ddp:2,fsdp:3",
) -> None:
    """Resident memory beyond what it was before joining, of the fullest rank. Its loop makes no gradients."""
    print("| model, learner | base and residual of its part | one fragment | joining: peak | between | ", end="")
    print("snapshot | publishing | pulling | adopting |\n" + "|---" * 9 + "|")
    for model in models.split(","):
        for kind, ranks in kinds(learners):
            with world(sync_interval=interval, codec=codec, first_interval=0) as here:
                learner = here.learner(kind, ranks, model=model, steps=steps, pace_s=pace_s, trains=False)
                until(lambda: learner.have("ended"))  # noqa: B023
                print(f"| {model}, {kind} of {ranks} | " + " | ".join(_memory(learner, ranks, codec)) + " |")
                sys.stdout.flush()


def _memory(learner: Ranks, ranks: int, codec: str) -> list[str]:
    elements = learner.said(0, "joined")[0]["elements"]
    part_mb = 4e-6 * sum(elements) / ranks * (2 if codec.startswith(("int", "e")) else 1)
    joining = max(one["peak_mb"] for rank in range(ranks) for one in learner.said(rank, "joined"))
    rows = [one for rank in range(ranks) for one in learner.said(rank, "did")]
    found = [part_mb, 4e-6 * max(elements), joining, max(one["rss_mb"] for one in rows if not one["did"])]
    for what in ({"snapshot"}, {"upload", "upload_encoded"}, {"pull"}, {"overwrite"}):
        found.append(max((one["peak_mb"] for one in rows if what & {*one["did"]}), default=0.0))
    return [f"{one:.0f} MB" for one in found]


# --- what is merged -----------------------------------------------------------------------------------------


@app.command()
def share(
    model: Annotated[str, typer.Option()] = "tiny",
    steps: Annotated[int, typer.Option()] = 400,
    pace_s: Annotated[float, typer.Option()] = 0.25,
    interval: Annotated[int, typer.Option()] = 24,
    overlap: Annotated[int, typer.Option(help="0: the default")] = 0,
    learners: Annotated[str, typer.Option(help="Side by side")] = "plain:1,plain:1,ddp:2,fsdp:3",
) -> None:
    """Learners in one run. Their steps take as long, but do not begin at the same time."""
    more = {"overlap_steps": overlap} if overlap else {}
    with world(sync_interval=interval, **more) as here:
        started = []
        for number, (kind, ranks) in enumerate(kinds(learners)):
            time.sleep(0.37 * pace_s * (number > 0))
            started.append(
                here.learner(kind, ranks, f"{number}-{kind}-{ranks}", model=model, steps=steps, pace_s=pace_s)
            )
        until(lambda: all(one.have("ended") for one in started))
        records, elements = asyncio.run(_tape(here.url, here.run)), started[0].said(0, "joined")[0]["elements"]
    print("| learner | of its tokens merged | deltas merged | stale of them |\n|---|---|---|---|")
    merged = [(one, record) for record in records if isinstance(record, Committed) for one in record.contributions]
    for learner in started:
        own = [(one, record) for one, record in merged if one.learner == learner.told.learner]
        tokens = sum(one.tokens * elements[record.fragment] for one, record in own) / sum(elements)
        trained = learner.told.tokens * steps * len(learner.processes)
        stale = sum(one.base_version < record.version - 1 for one, record in own)
        print(f"| {learner.told.learner} | {tokens / trained:.3f} | {len(own)} | {stale} |", flush=True)


async def _tape(url: str, run: str) -> list[TapeRecord]:
    async with open_bus(url, run) as bus:
        return await read_live(bus)


# --- a rank that is killed ----------------------------------------------------------------------------------


@app.command()
def kill(
    times: Annotated[int, typer.Option()] = 3,
    model: Annotated[str, typer.Option()] = "tiny",
    pace_s: Annotated[float, typer.Option()] = 0.25,
    window_s: Annotated[float, typer.Option(help="Time in which steps are counted, before and after")] = 20.0,
) -> None:
    """SIGKILL for one rank of three; beside it train a learner of two ranks, and one of one."""
    print("| killed | its learner is down after | pace of the others, after over before |\n|---|---|---|")
    told: dict[str, Any] = {"model": model, "steps": 10**6, "pace_s": pace_s}
    with world(sync_interval=24, codec="bf16") as here:
        others = [here.learner("plain", 1, **told), here.learner("ddp", 2, **told)]
        for number in range(times):
            struck = here.learner("fsdp", 3, f"struck-{number}", **told)
            until(lambda: all(one.have("t") for one in (struck, *others)))  # noqa: B023
            time.sleep(window_s + 5)
            rank, killed = (number + 1) % 3, time.monotonic()
            struck.processes[rank].kill()
            until(lambda: all(one.poll() is not None for one in struck.processes), 0.01)  # noqa: B023
            down_s = time.monotonic() - killed
            time.sleep(max(0.0, killed + window_s - time.monotonic()))
            paces = [_pace(one, killed, killed + window_s) / _pace(one, killed - window_s, killed) for one in others]
            print(f"| rank {rank} | {down_s:.1f} s | " + ", ".join(f"{one:.3f}" for one in paces) + " |", flush=True)


def _pace(learner: Ranks, begin: float, end: float) -> float:
    """Steps in a second, by the first and the last one in that time."""
    at: list[float] = [one["t"] for one in learner.said(0, "t") if begin <= one["t"] < end]
    return (len(at) - 1) / (at[-1] - at[0])


if __name__ == "__main__":
    app()
