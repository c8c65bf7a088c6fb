"""`diloco simulate`: the commands and their options. What they do is in `simulate_tables` and `simulate_needs`.

Loaded by that command alone: the images carry no `chaos`.
"""

import importlib
import os
from pathlib import Path
from typing import Annotated

import typer

from chaos.goodput.constants import Constants
from chaos.goodput.units import Amount, Span
from pipeline.errors import UsageError

from .options import PANELS, takes

PANELS[Constants] = "The simulated world"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="What goodput, uptime and bandwidth a training run would have, on up to millions of chips.",
)

Chips = Annotated[str, typer.Option(metavar="N,N,...", help="Chips of the whole run; '150k' is 150,000")]
Learners = Annotated[str, typer.Option(metavar="M,M,...", help="Numbers of learners")]
Seeds = Annotated[int, typer.Option(min=1, help="Seeds of each cell, for the error bars")]
Days = Annotated[float, typer.Option(min=0.01, help="Simulated days of each")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the table as JSON")]
Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Also write the table as CSV")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it, as PNG")]
Jobs = Annotated[int, typer.Option(min=0, help="Processes; 0: one a core")]
Cache = Annotated[bool, typer.Option(help="Use and keep results, by a digest of the settings and the code")]

TABLES, NEEDS = "diloco.simulate_tables", "diloco.simulate_needs"


def _processes(jobs: int) -> int:
    return jobs or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else jobs or os.cpu_count() or 1


@app.command()
@takes(Constants)
def table(
    settings: Constants,
    chips: Chips = "150k,600k,1.2M",
    learners: Learners = "1,2,4,8,16",
    seeds: Seeds = 5,
    days: Days = 30.0,
    json_file: Json = None,
    csv_file: Csv = None,
    plot: Plot = None,
    jobs: Jobs = 0,
    cache: Cache = True,
) -> None:
    """The paper's table: goodput and uptime of all methods against chips and learners."""
    importlib.import_module(TABLES).table(
        settings, chips, learners, seeds, days, json_file, csv_file, plot, _processes(jobs), cache
    )


@app.command()
@takes(Constants)
def calibrate(
    settings: Constants,
    seeds: Seeds = 3,
    days: Days = 20.0,
    json_file: Json = None,
    jobs: Jobs = 0,
) -> None:
    """Fit the calibrated constants to the paper's 150k and 1.2M columns, and show what is left over in all columns."""
    importlib.import_module(TABLES).calibrate(settings, seeds, days, json_file, _processes(jobs))


@app.command()
@takes(Constants)
def mtbi(
    settings: Constants,
    chips: Annotated[str, typer.Option(metavar="N", help="Chips of the whole run")] = "1.2M",
    learners: Learners = "1,2,4,8,16,32,64",
    times: Annotated[str, typer.Option(metavar="T,T,...", help="Mean times between interruptions of a chip")] = (
        "0.125y,0.25y,0.5y,1y,2y,4y"
    ),
    seeds: Seeds = 3,
    days: Days = 10.0,
    json_file: Json = None,
    csv_file: Csv = None,
    plot: Plot = None,
    jobs: Jobs = 0,
    cache: Cache = True,
) -> None:
    """Goodput, uptime and the longest stall against the mean time between interruptions."""
    importlib.import_module(TABLES).mtbi(
        settings, chips, learners, times, seeds, days, json_file, csv_file, plot, _processes(jobs), cache
    )


@app.command()
@takes(Constants)
def link(
    settings: Constants,
    chips: Annotated[str, typer.Option(metavar="N", help="Chips of the whole run")] = "150k",
    learners: Learners = "4",
    seeds: Seeds = 2,
    days: Days = 5.0,
    json_file: Json = None,
    plot: Plot = None,
    jobs: Jobs = 0,
    cache: Cache = True,
) -> None:
    """A trace of the link between regions, outages included, against a steady one.

    Example: diloco simulate link --link-trace examples/link-trace.txt --link 5Gbps --params 9B
    """
    importlib.import_module(TABLES).link(
        settings, chips, learners, seeds, days, json_file, plot, _processes(jobs), cache
    )


Amounts = Annotated[str, typer.Option(metavar="N", help="Parameters of the model, e.g. 10e9 or 70B")]


@app.command()
def bandwidth(
    params: Amounts = "10e9",
    step_time: Annotated[str, typer.Option(metavar="DURATION", help="Compute time of a step")] = "0.8",
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; 0: as usual for its size")] = 0,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Bandwidth that each method needs for 50 to 99 % of compute utilisation."""
    tables = importlib.import_module(TABLES)
    (size,), (step_s,) = tables.numbers(params, Amount, "params"), tables.numbers(step_time, Span, "step-time")
    if step_s <= 0:
        raise UsageError(f"--step-time {step_time}: above 0")
    importlib.import_module(NEEDS).bandwidth(size, step_s, layers, json_file, plot)


@app.command()
@takes(Constants)
def plan(
    settings: Constants,
    chips: Annotated[str, typer.Option(metavar="N", help="Chips of the whole run")] = "20000",
    json_file: Json = None,
) -> None:
    """What to choose (M, H, P, codec, syncers, Redis nodes) for so many chips, and why.

    Example: diloco simulate plan --chips 20000 --mtbi 0.5y --params 70B --step-time 3s --link 5Gbps
    """
    (count,) = importlib.import_module(TABLES).numbers(chips, Amount, "chips")
    importlib.import_module(NEEDS).plan(settings, count, json_file)


@app.command()
@takes(Constants)
def mixed(
    settings: Constants,
    learners: Annotated[int, typer.Option(min=2, max=512, help="M")] = 8,
    seeds: Seeds = 3,
    days: Days = 0.5,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Mixed hardware: goodput and participants when all wait for all, with K = 1, and with K = 1 and grace."""
    importlib.import_module(NEEDS).mixed(settings, learners, seeds, days, json_file, plot)


@app.command()
def scavenge(json_file: Json = None, plot: Plot = None) -> None:
    """Extra compute for a part of the run: relative time, data-parallel against decoupled."""
    importlib.import_module(NEEDS).scavenge(json_file, plot)
