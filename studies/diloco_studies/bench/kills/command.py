"""`diloco bench kills`: each method's run, unless its result is there, then the table and the picture."""

import asyncio
import importlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.launcher.folder import Folder
from diloco.options import RunProcess, with_preset
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.files.writable import check_files
from diloco.pipeline.process.interrupts import INTERRUPTED_STATUS
from diloco.pipeline.settings import load
from diloco.pipeline.units import parse_span
from diloco_studies.bench.kills import curves
from diloco_studies.bench.kills.plan import BATCH, EVAL_EVERY_S, METHODS, MODEL, SEQ_LEN, Method, Plan, in_words
from diloco_studies.bench.machine import describe
from diloco_studies.goodput.commands.options import one_whole
from diloco_studies.strikes.settings import ChaosProcess
from diloco_studies.strikes.telling import one_error

MAX_KILLS = 10_000
"""In a run."""


def settings_of(method: Method, plan: Plan) -> RunProcess:
    """Of a run of this method, a `ChaosProcess` if it is decoupled: what is not of the plan is as usual."""
    flags: dict[str, Any] = {
        "model": MODEL,
        "batch": BATCH,
        "seq_len": SEQ_LEN,
        "lr": method.lr,
        "learners": plan.machines,
        "syncers": 1,
        "tokens": plan.tokens,
        "seed": plan.seed,
        "pace": plan.pace_s,
        "eval_every": EVAL_EVERY_S,
        "log_losses": True,
        "overwrite": True,
    }
    if method.nodes:
        return with_preset(load(RunProcess, flags | {"method": "data-parallel"}))
    return with_preset(load(ChaosProcess, flags | {"kill": "none"}))


def read_result(path: Path, plan: Plan) -> curves.Result | None:
    """A result that is there; None: there is none.

    Raises:
        UsageError: it cannot be read, is damaged, or is of another plan.
    """
    if not path.is_file():
        return None
    try:
        result: curves.Result = json.loads(path.read_text())
        made_with = {**result["plan"]}
        if made_with == plan.written():
            return curves.read(result, plan)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a result of `diloco bench kills`: {error!r}; delete it to measure again, or choose a "
            "different --out"
        ) from error
    told = {name: value for name, value in made_with.items() if plan.written().get(name) != value}
    raise UsageError(f"{path} was measured with other settings ({told}): use those, or choose a different --out")


def make(method: Method, plan: Plan, out: Path) -> curves.Result | None:
    """Run a method and keep its result; None: the user stopped it."""
    settings, folder = settings_of(method, plan), Folder(out / method.name)
    before, began_s, cpu_s = describe("embedded" if not method.nodes else "none"), time.monotonic(), _cpu_s()
    if method.nodes:
        machines = importlib.import_module("diloco_studies.bench.kills.machines")
        run = asyncio.run(machines.run(method, plan, settings, folder))
    else:
        decoupled = importlib.import_module("diloco_studies.bench.kills.decoupled")
        run = asyncio.run(decoupled.run(plan, settings, folder))
    if run is None:
        return None
    share = (_cpu_s() - cpu_s) / (time.monotonic() - began_s) / before["cores"]
    result = {"method": method.name, "lr": method.lr, "plan": plan.written(), "machine": before}
    result |= {**curves.result_of(run, plan), "cpu_share": round(share, 3)}
    beside, path = out / f".{method.name}.json", out / f"{method.name}.json"
    beside.write_text(dumps(result) + "\n")
    beside.replace(path)
    return read_result(path, plan)


def _cpu_s() -> float:
    """CPU time of this process and of all that it has waited for: not of ranks that a kill took with their agent."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _seconds(option: str, text: str) -> float:
    try:
        found = float(parse_span(text))
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise UsageError(f"{option} {text}: use a duration, such as 400ms, 35s or 10m")
    return found


def main(
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for results; methods with a result there are not run again")
    ] = Path("runs/kills"),
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="The plot (default: kills.png in the folder)")
    ] = None,
    only: Annotated[str, typer.Option(metavar="METHOD,...", help=f"Run only these of {', '.join(METHODS)}")] = "",
    tokens: Annotated[str, typer.Option(metavar="N", help="Budget: trained tokens of all machines together")] = "2.4M",
    machines: Annotated[int, typer.Option(min=2, max=16, help="Number of machines")] = 4,
    every: Annotated[str, typer.Option(metavar="DURATION", help="Mean time between kills")] = "35s",
    away: Annotated[str, typer.Option(metavar="DURATION", help="Time until a killed machine is started again")] = "15s",
    pace: Annotated[str, typer.Option(metavar="DURATION", help="Length of an inner step")] = "400ms",
    within: Annotated[str, typer.Option(metavar="DURATION", help="Maximum time of a method")] = "12m",
    seed: Annotated[int, typer.Option(min=0, help="Seed of kills, parameters and data")] = 1,
) -> None:
    """Train by each method under the same kills: held-out loss by wall time, a table and a picture. Linux only.

    decoupled is a run like that of `diloco run`. elastic and data-parallel are torch's DDP under torchrun, with an
    agent on each machine: elastic continues with one machine fewer and readmits it later, data-parallel waits for it.
    undisturbed is the latter without kills. A machine here is a process group, killed with SIGKILL.

    It takes about 25 minutes. Repeat the command to continue after a stop: finished methods are not run again.

    Example: diloco bench kills --out runs/kills --plot kills.png
    """
    if sys.platform != "linux":
        raise UsageError("`diloco bench kills` needs Linux: it starts machines by forking")
    for name in (wanted := only.split(",") if only else list(METHODS)):
        if name not in METHODS:
            raise UsageError(f"--only {name}: use one of {', '.join(METHODS)}")
    plan = Plan(
        machines=machines,
        tokens=one_whole(tokens, "tokens"),
        pace_s=_seconds("--pace", pace),
        every_s=_seconds("--every", every),
        away_s=_seconds("--away", away),
        within_s=_seconds("--within", within),
        seed=seed,
    )
    if (most := plan.within_s / plan.every_s) > MAX_KILLS:
        raise UsageError(
            f"--every {every}: {most:,.0f} kills --within {within}, but at most {MAX_KILLS:,} are allowed: use a "
            "longer time"
        )
    out.mkdir(parents=True, exist_ok=True)
    plot = plot or out / "kills.png"
    check_files(plot)
    found = {name: read_result(out / f"{name}.json", plan) for name in METHODS}
    typer.echo(in_words(plan))
    for name in wanted:
        if found[name] is not None:
            typer.echo(f"{name}: already has a result")
            continue
        with one_error(out / name / "logs"):
            found[name] = make(METHODS[name], plan, out)
        if found[name] is None:
            typer.echo(f"stopped in {name}: repeat the command to continue")
            raise typer.Exit(INTERRUPTED_STATUS)
    results = {name: one for name, one in found.items() if one is not None}
    table = curves.markdown(results, plan)
    importlib.import_module("diloco_studies.bench.kills.picture").draw(results, plan, plot)
    typer.echo(f"\n{table}\n\npicture {plot}")
    for name, one in results.items():
        for promise in one["broken"]:
            typer.echo(f"VIOLATION in {name}: {promise}")
