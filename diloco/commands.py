"""The commands that are one process: parties that join a run, and commands that read what a run has written.

Heavy packages (torch, matplotlib, Redis) are imported by the commands that need them.
"""

import asyncio
import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import structlog
import typer

from diloco.extras import load_extra
from diloco.launcher.option_checks import check_data, check_evaluator, check_model_name
from diloco.options import RedisProcess, reached_at, takes
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.address import is_address
from diloco.pipeline.files.writable import try_folder
from diloco.pipeline.messages.wire import printable
from diloco.pipeline.process import signals
from diloco.pipeline.settings import EvaluatorProcess, LearnerProcess, RankProcess, SyncerProcess
from diloco.pipeline.waiting import first_of

# Interval at which `diloco redis` checks that its server still answers.
LOOK_S = 1.0
# Advice for a party that has no Redis to join.
INSTEAD = "to start everything on this machine, use `diloco run`"


@takes(LearnerProcess)
def learner(settings: LearnerProcess) -> None:
    """Join a run as a learner, with the built-in trainer.

    Settings left out (model, data, sync interval ...) follow the run; the first learner of a new run sets them.
    """
    check_model_name(settings.model)
    check_data(settings.data)
    settings.need_url(INSTEAD)
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # torch reads it when it loads; without it idle OpenMP threads spin on the cores
    raise typer.Exit(load_extra("diloco.workers.trainer.trainer", "learner").train(settings))


@takes(SyncerProcess)
def syncer(settings: SyncerProcess) -> None:
    """Serve a run as its syncer: gather deltas, merge, publish the global fragments. Needs no torch."""
    for place in filter(None, (settings.checkpoint_dir, settings.resume)):
        importlib.import_module("diloco.syncer.checkpoints.places").place_of(place)
    if str(settings.checkpoint_dir).startswith("memory://"):
        raise UsageError(
            f"--checkpoint-dir {settings.checkpoint_dir} would be lost with the syncer: use a folder, "
            "s3://bucket/path or gs://bucket/path"
        )
    for folder in (settings.checkpoint_dir, settings.tape_dir, settings.record_deltas):
        if folder is not None and not is_address(str(folder)):
            with suppress(OSError):  # a full disk is reported as a warning below, it does not end the syncer
                try_folder(Path(folder))
    settings.need_url(INSTEAD)
    for finding in importlib.import_module("diloco.doctor.start").wrong_for_syncer(settings):
        structlog.get_logger().warning("machine_warning", about=finding.about, detail=str(finding))
    raise typer.Exit(load_extra("diloco.syncer.serving.service", "syncer").main(settings))


@takes(EvaluatorProcess)
def evaluator(settings: EvaluatorProcess) -> None:
    """Measure the held-out loss of a run's global parameters as they change."""
    check_evaluator(settings)
    settings.need_url(INSTEAD)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    raise typer.Exit(load_extra("diloco.workers.trainer.evaluator_process", "evaluator").evaluate_run(settings))


@takes(RankProcess)
def rank(
    settings: RankProcess,
    number: Annotated[int, typer.Option("--rank")],
    learners: Annotated[int, typer.Option("--learners")],
    out: Annotated[Path, typer.Option("--out")],
) -> None:
    """Run one rank of the data-parallel baseline; `diloco run --method data-parallel` starts them."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    baseline = load_extra("diloco.workers.trainer.data_parallel", "run --method data-parallel")
    raise typer.Exit(baseline.run_rank(settings, out, learners, number))


async def _serve_redis(settings: RedisProcess) -> None:
    from diloco.pipeline.bus.embedded import EmbeddedRedis

    stop = signals.stop_event()
    with EmbeddedRedis(
        port=settings.redis_port,
        host=settings.redis_bind,
        password=settings.secret(),
        dies_with_us=True,
        users=settings.redis_users,
    ) as server:
        typer.echo(f"until Ctrl-C, all parties reach it with: export DILOCO_REDIS_URL={reached_at(settings)}")
        while not stop.is_set():
            server.answers()
            await first_of(stop, timeout_s=LOOK_S)


@takes(RedisProcess)
def redis(settings: RedisProcess) -> None:
    """Start a Redis for the parties of a run, here and on other machines: the same server that `diloco run` embeds.

    It keeps nothing on disk. After a restart, the syncers and learners that are still running restore what it has lost;
    without them a run continues from its checkpoint.

    Examples: diloco redis --redis-bind 192.168.1.10; diloco redis --redis-bind 192.168.1.10 --redis-users users.acl
    """
    asyncio.run(_serve_redis(settings))


def acl(
    learner: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A learner with its own user; repeat the option for each")
    ] = None,
    run: Annotated[
        str, typer.Option(envvar="DILOCO_RUN", help="Name of the run, or '*' for every run (default: run)")
    ] = "",
    passwords: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of lines REDIS_<USER>_PASSWORD=...; missing passwords are generated and added"
        ),
    ] = None,
    template: Annotated[bool, typer.Option(help="Print deploy/users.acl, with variables instead of hashes")] = False,
    failover: Annotated[
        bool,
        typer.Option(
            "--failover",
            help="Add the users `replica`, `sentinel` and `setup`, for servers that take over from each other",
        ),
    ] = False,
) -> None:
    """Print an ACL file for Redis 7: a user for each party, with no more rights than it needs.

    Passwords come from REDIS_<USER>_PASSWORD, e.g. REDIS_SYNCER_PASSWORD, or from --passwords. The user `learner` is
    for learners of any name, which can then publish in each other's names; `learner-NAME` publishes as NAME only.
    """
    maker = importlib.import_module("diloco.acl")
    if not (run or template):
        typer.echo(
            "note: these users are for the run 'run'; for another run pass --run NAME, for all runs of this Redis "
            "--run '*'",
            err=True,
        )
    typer.echo(maker.template() if template else maker.make(run or "run", learner or [], passwords, failover), nl=False)


# Bounds of a temperature other than 0: logits divided by these stay finite and distinct.
COLDEST, HOTTEST = 1e-3, 1e3
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Checkpoint folder, or a run's output folder (its newest checkpoint), or s3://bucket/path",
    ),
]


def export(
    checkpoint: Checkpoint,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="File to write, OUT.safetensors; with --hf or --dcp, a folder")
    ],
    hf: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG_DIR",
            help="Write a folder for transformers' from_pretrained, with the config, the tokenizer and the untrained "
            "weights of this folder; for peft's from_pretrained if it has adapter_config.json",
        ),
    ] = None,
    dcp: Annotated[bool, typer.Option("--dcp", help="Write a folder for torch.distributed.checkpoint")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace existing files")] = False,
) -> None:
    """Write the global parameters of a checkpoint as a plain safetensors file, with one entry per tensor.

    With --hf, write a folder that transformers or peft loads, in the dtype that config.json names. With --dcp, write a
    folder that torch.distributed.checkpoint loads, in float32.
    """
    if dcp:
        if hf is not None:
            raise UsageError("--hf and --dcp are two formats: pass one of them")
        importlib.import_module("diloco.export_dcp").export_dcp(checkpoint, out, overwrite)
        return
    if hf is not None:
        importlib.import_module("diloco.export_hf").export_hf(checkpoint, out, hf, overwrite)
        return
    importlib.import_module("diloco.export").export(checkpoint, out, overwrite)


def _seed(value: int) -> int:
    """Check a seed. typer's own range check would show a limit of 19 digits."""
    if not 0 <= value < 2**63:
        raise typer.BadParameter(f"{value}: use a number from 0 to 2^63 - 1")
    return value


def _temperature(value: float) -> float:
    """Check a temperature. typer's own range check lets NaN pass, and cannot allow 0 below its lower bound."""
    if value and not COLDEST <= value <= HOTTEST:
        raise typer.BadParameter(f"{value}: use 0, or a number from {COLDEST:g} to {HOTTEST:g}")
    return value


def _utf8(value: str) -> str:
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise typer.BadParameter("not UTF-8")
    return value


def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(callback=_utf8, help="Start of the text")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, max=10**9, help="Tokens to generate")] = 200,
    temperature: Annotated[
        float, typer.Option(callback=_temperature, help="Sampling temperature; 0: always the likeliest token")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many likeliest tokens")] = 40,
    seed: Annotated[int, typer.Option(callback=_seed, help="Seed of the sampling, from 0")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder with the run's token shards (index.json and tokenizer.json are enough)"
        ),
    ] = None,
) -> None:
    """Generate text with the global parameters of a checkpoint."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    checkpoints = importlib.import_module("diloco.export")
    checkpoints.find_checkpoint(checkpoint)  # before torch is imported, which takes seconds
    sampler = load_extra("diloco.workers.trainer.sample", "sample")
    loaded = checkpoints.make_of_globals(
        checkpoint, lambda found: sampler.load_model(found.folder, found.trainer, found.tensors)
    )
    typer.echo(printable(sampler.sample(loaded, prompt, tokens, temperature, top_k, seed, data), "\n\t"))
