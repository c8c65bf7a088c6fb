"""The command line. Heavy parts (torch, matplotlib, Redis) are imported by the commands that need them."""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from safetensors import SafetensorError

from pipeline import logs
from pipeline.errors import DilocoError, UsageError
from pipeline.settings import NO_FLAG, BusSettings, EvaluatorProcess, LearnerProcess, RankProcess, SyncerProcess

from .options import CHOSEN_BY_LAUNCHER, NOT_OF_CHAOS, ChaosProcess, RunProcess, takes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Decoupled DiLoCo: learners that never wait, one syncer, one Redis.",
)

_EXTRAS = {"torch": "learner", "matplotlib": "run"}
"""Optional packages and the extra of this project that brings them."""


def load_extra(module: str, command: str) -> ModuleType:
    """Import a module of ours that needs an optional package.

    Raises:
        UsageError: the package is missing; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package not in _EXTRAS:
            raise
        raise _missing(package, command) from error


def _missing(package: str, command: str) -> UsageError:
    return UsageError(
        f"`diloco {command}` needs {package}, which is not installed: "
        f"pip install 'decoupled-diloco[{_EXTRAS[package]}]'"
    )


def _version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"diloco {version('decoupled-diloco')}")
    except PackageNotFoundError:
        typer.echo("diloco (from a source tree, not installed)")
    raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _join(settings: BusSettings, command: str) -> None:
    """Checks and set-up of a process that joins a run."""
    if settings.redis_url is None:
        raise UsageError(
            f"`diloco {command}` needs a Redis: give --redis-url redis://HOST:6379, or set DILOCO_REDIS_URL "
            "(the place for a URL with a password). To start everything on this machine: diloco run"
        )
    logs.configure(settings.log_level)


@app.command()
@takes(RunProcess, omit=CHOSEN_BY_LAUNCHER)
def run(settings: RunProcess) -> None:
    """Train on this machine: an embedded Redis, a syncer, learners and an evaluator, one display, one report."""
    for package in _EXTRAS:
        if find_spec(package) is None:  # looked for, not imported: that takes seconds
            raise _missing(package, "run")
    launcher = importlib.import_module("diloco.run")
    raise typer.Exit(launcher.main(settings))


ChaosFor = Annotated[str, typer.Option("--for", metavar="DURATION", help="How long the run is struck")]
ChaosJson = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the report to this file")]
Undisturbed = Annotated[
    bool,
    typer.Option(
        "--undisturbed",
        help="Afterwards make the same run without strikes, until it has merged as many tokens, and put final losses "
        "and tokens/s of both into the report. Give --tokens that the run reaches within --for, so that the learning "
        "rate ends its schedule",
    ),
]
Beside = Annotated[
    Path | None,
    typer.Option(
        "--beside",
        metavar="REPORT",
        help="Put this run beside an earlier one (its --json file) in a table, e.g. of the other --method. Goodput is "
        "there if both were made with --undisturbed",
    ),
]


@app.command()
@takes(ChaosProcess, omit=CHOSEN_BY_LAUNCHER | NOT_OF_CHAOS)
def chaos(
    settings: ChaosProcess,
    for_: ChaosFor = "60s",
    json_file: ChaosJson = None,
    undisturbed: Undisturbed = False,
    beside: Beside = None,
) -> None:
    """Strike a real run on this machine, then audit it. Linux only.

    Learners, syncers and Redis are killed, paused and cut off while they work.
    What they leave is audited: versions rise by one, nothing is merged twice,
    every token and data shard is accounted for, nothing grows without bound.
    Ends with a verdict, a report and a picture in the output folder, and with
    exit status 1 if a promise was broken. Ctrl-C ends the strikes, not the audit.

    Example: diloco chaos --kill learner:3s,syncer:7s,redis:20s --for 120s --seed 1
    """
    for package in _EXTRAS:
        if find_spec(package) is None:
            raise _missing(package, "chaos")
    raise typer.Exit(importlib.import_module("diloco.chaos").main(settings, for_, json_file, undisturbed, beside))


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def simulate(context: typer.Context) -> None:
    """Goodput, uptime, bandwidth and a plan for runs on up to millions of chips: a group of commands."""
    _group("simulate", context)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(context: typer.Context) -> None:
    """Quality experiments with real gradients in virtual time, their tables and plots: a group of commands."""
    _group("lab", context)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Benchmarks on this machine, beside what it could do at best: a group of commands."""
    _group("bench", context)


def _group(name: str, context: typer.Context) -> None:
    """Commands of a module of its own, loaded when they are asked for: images carry no chaos."""
    if find_spec("chaos") is None:
        raise UsageError(f"`diloco {name}` is not part of this image: use an installation of decoupled-diloco")
    importlib.import_module(f"diloco.{name}").app(args=context.args, prog_name=f"diloco {name}")


@app.command()
@takes(LearnerProcess)
def learner(settings: LearnerProcess) -> None:
    """Join a run as a learner, with the built-in trainer.

    What is not told otherwise (model, data, sync interval ...) follows the run; the first learner of a new run sets it.
    """
    _join(settings, "learner")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch loads: idle threads must not spin
    raise typer.Exit(load_extra("workers.trainer", "learner").train(settings))


@app.command()
@takes(SyncerProcess, omit=NO_FLAG)
def syncer(settings: SyncerProcess) -> None:
    """Serve a run as its syncer: gather deltas, merge, publish the global fragments. Needs no torch."""
    _join(settings, "syncer")
    raise typer.Exit(load_extra("syncer.service", "syncer").main(settings))


@app.command()
@takes(EvaluatorProcess)
def evaluator(settings: EvaluatorProcess) -> None:
    """Measure the held-out loss of a run's global parameters as they change."""
    _join(settings, "evaluator")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    raise typer.Exit(load_extra("workers.evaluator", "evaluator").evaluate_run(settings))


@app.command("rank", hidden=True)
@takes(RankProcess)
def rank(
    settings: RankProcess,
    number: Annotated[int, typer.Option("--rank")],
    learners: Annotated[int, typer.Option("--learners")],
    out: Annotated[Path, typer.Option("--out")],
) -> None:
    """One process of the data-parallel baseline; `diloco run --method data-parallel` starts them."""
    logs.configure(settings.log_level)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    baseline = load_extra("workers.baselines.data_parallel", "run --method data-parallel")
    raise typer.Exit(baseline.run_rank(settings, out, learners, number))


@app.command("elastic", hidden=True)
@takes(RankProcess)
def elastic(
    settings: RankProcess,
    learners: Annotated[int, typer.Option("--learners")],
    out: Annotated[Path, typer.Option("--out")],
    every_s: Annotated[float, typer.Option("--every-s")],
) -> None:
    """The agent of the data-parallel baseline under strikes; `diloco chaos --method data-parallel` starts it."""
    logs.configure(settings.log_level)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    agent = load_extra("workers.baselines.elastic", "chaos --method data-parallel")
    raise typer.Exit(agent.run_agent(settings, out, learners, every_s))


Folder = Annotated[
    Path | None, typer.Argument(metavar="[DIR]", help="Output folder of `diloco run` (default: the newest in runs/)")
]
TapeFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DIR]",
        help="Output folder of `diloco run`, finished or not, or a syncer's --tape-dir (default: the newest in runs/)",
    ),
]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="RECORDING",
        help="Make every merge again from this folder of --record-deltas and compare; exit status 1 if any differs. "
        "The tape is that of the folder around RECORDING, or of DIR: an output folder, or a folder of --tape-dir",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text")]


@app.command()
@takes(BusSettings)
def status(settings: BusSettings, folder: Folder = None, as_json: AsJson = False) -> None:
    """Show a live run, or the report of a finished one."""
    logs.configure(settings.log_level)
    importlib.import_module("diloco.status").show(settings, folder, as_json)


@app.command()
@takes(BusSettings)
def tape(settings: BusSettings, folder: TapeFolder = None, as_json: AsJson = False, replay: Replay = None) -> None:
    """Print a run's event tape: merges with their contributions, refusals with their reasons, windows.

    With --replay, make all its merges again from what --record-deltas kept, and compare.
    """
    logs.configure(settings.log_level)
    if replay is not None:
        raise typer.Exit(importlib.import_module("diloco.replay").check(settings, replay, folder, as_json))
    importlib.import_module("diloco.tape").show(settings, folder, as_json)


@app.command("acl")
def acl(
    learner: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A learner with a user of its own; give it once for each")
    ] = None,
    run: Annotated[str, typer.Option(envvar="DILOCO_RUN", help="Name of the run, or '*' for every run")] = "run",
    passwords: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lines REDIS_<USER>_PASSWORD=...; what is missing is made up and added"),
    ] = None,
    template: Annotated[bool, typer.Option(help="Print deploy/users.acl, with variables in place of hashes")] = False,
) -> None:
    """Print an ACL file for Redis 7: a user for each party, with no more rights than it needs.

    Passwords come from REDIS_<USER>_PASSWORD, e.g. REDIS_SYNCER_PASSWORD, or from --passwords. The user `learner` is
    for learners of any name, whom nothing keeps from each other's deltas; `learner-NAME` publishes as NAME only.
    """
    maker = importlib.import_module("diloco.acl")
    typer.echo(maker.template() if template else maker.make(run, learner or [], passwords), nl=False)


Checkpoint = Annotated[Path, typer.Argument(help="Checkpoint folder, or a run's output folder (its newest checkpoint)")]


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="File to write")],
    overwrite: Annotated[bool, typer.Option(help="Replace an existing file")] = False,
) -> None:
    """Write the global parameters of a checkpoint as a plain safetensors file, one entry a tensor."""
    importlib.import_module("diloco.export").export(checkpoint, out, overwrite)


@app.command()
def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help="Start of the text")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Draw from this many likeliest tokens")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw")] = 0,
) -> None:
    """Generate text with the global parameters of a checkpoint."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sampler = load_extra("workers.sample", "sample")
    checkpoints = importlib.import_module("diloco.export")
    loaded = sampler.load_model(checkpoints.find_checkpoint(checkpoint))
    typer.echo(checkpoints.printable(sampler.sample(loaded, prompt, tokens, temperature, top_k, seed)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 for a usage error, 1 for any other failure."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="diloco")
    except DilocoError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, UsageError) else 1
    except (OSError, SafetensorError) as error:  # a full disk, a damaged file: the system's words say what
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        return 1
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0
