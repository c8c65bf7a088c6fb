"""`diloco simulate`: the commands and their options. What they do is in `tables` and `needs`.

Loaded by that command alone.
"""

import importlib
from collections.abc import Sequence
from typing import Annotated

import typer

from diloco.cli import new_app
from diloco.options import takes
from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.wire import MAX_FRAGMENTS, MAX_MEMBERS
from diloco.pipeline.needs import GLOBALS, USUAL
from diloco.pipeline.redis_memory import CODECS
from diloco_studies.goodput.commands.options import Files, Pictured, Sample, shares
from diloco_studies.goodput.constants import Constants, Planned

app = new_app(
    no_args_is_help=True,
    help="Simulate the goodput, uptime and bandwidth of training runs on up to millions of chips.",
)

Chips = Annotated[str, typer.Option(metavar="N,N,...", help="Chips of the whole run; '150k' is 150,000")]
OneSize = Annotated[str, typer.Option(metavar="N", help="Chips of the whole run; '150k' is 150,000")]
Learners = Annotated[str, typer.Option(metavar="M,M,...", help=f"Numbers of learners, each at most {MAX_MEMBERS:,}")]
Params = Annotated[str, typer.Option(metavar="N", help="Parameters of the model, e.g. 10e9 or 70B")]

TABLES, NEEDS = "diloco_studies.goodput.commands.tables", "diloco_studies.goodput.commands.needs"
BANDWIDTH = "diloco_studies.goodput.bandwidth"


@app.command()
@takes(Constants)
@shares(sample=Sample(seeds=5, days=30.0), files=Pictured())
def table(
    settings: Constants,
    chips: Chips = "150k,600k,1.2M",
    learners: Learners = "1,2,4,8,16",
    *,
    sample: Sample,
    files: Pictured,
) -> None:
    """The paper's table: goodput, uptime and longest stall of all methods against chips and learners."""
    importlib.import_module(TABLES).table(settings, chips, learners, sample, files)


@app.command()
@takes(Constants)
@shares(sample=Sample(seeds=3, days=20.0), files=Files())
def calibrate(
    settings: Constants,
    held_out: Annotated[
        str, typer.Option(metavar="N,N,...", help="Columns of the paper's table that a fit leaves out, one at a time")
    ] = "600k",
    *,
    sample: Sample,
    files: Files,
) -> None:
    """Fit the calibrated constants to two of the paper's columns, hold out the third, and show the errors of all.

    Example: diloco simulate calibrate --held-out 150k,600k,1.2M
    """
    importlib.import_module(TABLES).calibrate(settings, held_out, sample, files)


@app.command()
@takes(Constants)
@shares(sample=Sample(seeds=3, days=10.0), files=Pictured())
def mtbi(
    settings: Constants,
    chips: OneSize = "1.2M",
    learners: Learners = "1,2,4,8,16,32,64",
    times: Annotated[str, typer.Option(metavar="T,T,...", help="Mean times between interruptions of a chip")] = (
        "0.125y,0.25y,0.5y,1y,2y,4y"
    ),
    *,
    sample: Sample,
    files: Pictured,
) -> None:
    """Goodput, uptime and the longest stall against the mean time between interruptions."""
    importlib.import_module(TABLES).mtbi(settings, chips, learners, times, sample, files)


@app.command()
@takes(Constants)
@shares(sample=Sample(seeds=2, days=5.0), files=Files())
def link(
    settings: Constants, chips: OneSize = "150k", learners: Learners = "4", *, sample: Sample, files: Files
) -> None:
    """A trace of the link between regions, including outages, compared with a steady link.

    Example: diloco simulate link --link-trace examples/link-trace.txt --link 5Gbps --params 9B
    """
    importlib.import_module(TABLES).link(settings, chips, learners, sample, files)


@app.command()
@shares(files=Files())
def bandwidth(
    params: Params = "10e9",
    step_time: Annotated[str, typer.Option(metavar="DURATION", help="Compute time of a step")] = "0.8",
    layers: Annotated[
        int, typer.Option(min=0, max=1000, help="Layers of the model; 0: the usual number for its size")
    ] = 0,
    sync_interval: Annotated[int, typer.Option(min=1, max=10**6, help="H of all methods except data-parallel")] = USUAL[
        "sync_interval"
    ],
    codec: Annotated[str, typer.Option(metavar="|".join(CODECS), help="Codec of deltas in these methods")] = USUAL[
        "codec"
    ],
    global_codec: Annotated[
        str, typer.Option(metavar="|".join(GLOBALS), help="Codec of the globals that decoupled learners pull")
    ] = USUAL["global_codec"],
    fragments: Annotated[int, typer.Option(min=1, max=MAX_FRAGMENTS, help="P of decoupled learners")] = USUAL[
        "fragments"
    ],
    overlap_steps: Annotated[
        int, typer.Option(min=0, max=10**6, help="Steps tau that may hide a decoupled sync")
    ] = USUAL["overlap_steps"],
    *,
    files: Files,
) -> None:
    """Bandwidth that each method needs for 50 to 99 % compute utilisation, with a run's H and codecs.

    Example: diloco simulate bandwidth --params 10e9 --sync-interval 100 --codec int4
    """
    _check_codecs(codec, tuple(CODECS), global_codec)
    run = importlib.import_module(BANDWIDTH).Run(sync_interval, codec, global_codec, fragments, overlap_steps)
    importlib.import_module(NEEDS).bandwidth(params, step_time, layers, run, files)


def _check_codecs(codec: str, codecs: Sequence[str], global_codec: str) -> None:
    if codec not in codecs:
        raise UsageError(f"--codec {codec}: use one of {', '.join(codecs)}")
    if global_codec not in GLOBALS:
        raise UsageError(f"--global-codec {global_codec}: use one of {', '.join(GLOBALS)}")


@app.command()
@takes(Planned)
@shares(files=Files())
def plan(
    settings: Planned,
    chips: OneSize = "20000",
    learners: Annotated[
        int | None,
        typer.Option(metavar="M", min=1, max=MAX_MEMBERS, help="Number of learners (default: chosen by the goodput)"),
    ] = None,
    codec: Annotated[
        str,
        typer.Option(
            metavar="|".join(("auto", *CODECS)), help="Codec of deltas; auto: bf16 unless the link needs less"
        ),
    ] = "auto",
    global_codec: Annotated[
        str, typer.Option(metavar="|".join(GLOBALS), help="Codec of the globals that learners pull")
    ] = USUAL["global_codec"],
    *,
    files: Files,
) -> None:
    """Like `diloco plan`, for a number of chips: also choose the number of learners by their goodput.

    Example: diloco simulate plan --chips 20000 --mtbi 0.5y --params 70B --step-time 3s --link 5Gbps
    """
    _check_codecs(codec, ("auto", *CODECS), global_codec)
    importlib.import_module(NEEDS).plan(settings, chips, learners, codec, global_codec, files)


@app.command()
@takes(Constants)
@shares(files=Files())
def mixed(
    settings: Constants,
    learners: Annotated[int, typer.Option(min=2, max=MAX_MEMBERS, help="M")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, for the error bars")] = 3,
    days: Annotated[float, typer.Option(min=0.01, max=365, help="Simulated days of each seed")] = 0.5,
    *,
    files: Files,
) -> None:
    """Mixed hardware: goodput and participants if all wait for all, with K = 1, and with K = 1 and grace."""
    importlib.import_module(NEEDS).mixed(settings, learners, seeds, days, files)


@app.command()
@shares(files=Files())
def scavenge(*, files: Files) -> None:
    """Extra compute for a part of the run: relative time, data-parallel against decoupled."""
    importlib.import_module(NEEDS).scavenge(files)
