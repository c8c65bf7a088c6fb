"""`diloco plan`: say what a run needs. `pipeline.needs` has the arithmetic."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field
from rich.console import Console
from rich.table import Table

from diloco.launcher.display import say
from diloco.options import RunSettings, takes
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.replacing import write_named
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.files.writable import check_files
from diloco.pipeline.messages.wire import MAX_MEMBERS, MAX_STEPS, Codec, GlobalCodec, OuterName
from diloco.pipeline.needs import CHOSEN, Needs, needs_of, pace_of
from diloco.pipeline.party_memory import LEARNER_PROCESS_BYTES, Precision
from diloco.pipeline.settings import SyncSettings, defaults
from diloco.pipeline.site import Site, params_of
from diloco.pipeline.units import as_bytes, as_rate, counted, written

USUAL = defaults(SyncSettings) | defaults(RunSettings)


class PlanSettings(Site):
    """The arguments of a plan that are not those of its site."""

    section = "The run"

    learners: int = Field(USUAL["learners"], ge=1, le=MAX_MEMBERS, description="Number of learners M")
    ranks: int = Field(
        1, ge=1, le=4096, description="Ranks per learner, which share its parameters, gradients and moments (FSDP2)"
    )
    precision: Precision = Field(
        "fp32", description="Precision of training; bf16: compute in a bf16 copy and keep fp32 master weights"
    )
    overlap_steps: int = Field(
        USUAL["overlap_steps"], ge=0, le=MAX_STEPS, description="Inner steps tau that may hide a sync"
    )
    codec: Literal["auto", Codec] = Field("auto", description="Codec of deltas; auto: bf16 unless the link needs less")
    global_codec: GlobalCodec = Field(USUAL["global_codec"], description="Codec of the globals that learners pull")
    outer: OuterName = Field(
        USUAL["outer"], description="Outer optimizer; all except nesterov multiply matrices on the syncers"
    )


def choices(needs: Needs, title: str) -> Table:
    """Return a table of the chosen settings, each with its reason."""
    shown = Table(title=title, show_lines=True)
    for name in ("choose", "", "why"):
        shown.add_column(name)
    for name, heading in CHOSEN.items():
        if name in needs.why:
            shown.add_row(heading, str(getattr(needs, name)), needs.why[name])
    return shown


def in_own_loop(needs: Needs) -> str:
    """Return the settings that differ from their defaults as a call of `Learner`, which reads no settings file."""
    unusual = [f"{name}={value!r}" for name, value in needs.settings.items() if value != USUAL[name]]
    return f"Learner(..., sync=SyncSettings({', '.join(unusual)}))" if unusual else "none, since these are the defaults"


def show(console: Console, needs: Needs) -> None:
    """Print what each machine needs, the settings to run with, and warnings."""
    machines = Table(title="each machine")
    for name in ("", "how many", "cores", "memory", "training", "in and out"):
        machines.add_column(name, justify="right" if name else "left")
    for party in needs.parties:
        memory, rate = as_bytes(party.memory_bytes), as_rate(party.bytes_per_s)
        training = as_bytes(party.training_bytes) if party.training_bytes else ""
        machines.add_row(party.name, str(party.machines), f"{party.cores:.2g}", memory, training, rate)
    console.print(machines)
    say(
        f"memory of a {needs.parties[0].name}: its process ({as_bytes(LEARNER_PROCESS_BYTES)} for Python, torch and "
        "the program) and what its exchange adds to training, which has parameters, gradients and AdamW's moments, "
        "without activations",
        console,
    )
    say(
        "a syncer: cores at peak; memory when all windows are open and another syncer has died",
        console,
    )
    say(
        "a Redis node: memory is maxmemory, and its machine needs twice as much; traffic is to and from learners and "
        "syncers; that of a syncer on the same machine does not pass the network\n",
        console,
    )
    console.print("settings for all parties, in a file for --config:")
    for name, value in needs.settings.items():
        console.print(f"  {name} = {dumps(value)}", highlight=False)
    console.print(
        f"in your own loop, where the first learner sets them for all: {in_own_loop(needs)}",
        highlight=False,
        soft_wrap=True,
    )
    if needs.threads > 1:
        console.print(f"and start each syncer with OPENBLAS_NUM_THREADS={needs.threads}", highlight=False)
    for warning in needs.warnings:
        say(f"warning: {warning}", console)


@takes(PlanSettings)
def command(
    settings: PlanSettings,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the plan to this file as JSON")
    ] = None,
) -> None:
    """Choose settings (H, P, codec, syncers, Redis nodes) for a number of learners, and show what they need.

    To choose the number of learners for a number of chips, use `diloco simulate plan`, which simulates their failures.

    Example: diloco plan --learners 4 --params 70B --step-time 3s --link 5Gbps --outer nesterov
    """
    check_files(json_file)
    settings = settings.model_copy(update={"params": params_of(settings)})
    learners, overlap_steps, outer = settings.learners, settings.overlap_steps, settings.outer
    try:
        pace = pace_of(settings, learners, overlap_steps, settings.codec, settings.global_codec, outer)
        needs = needs_of(settings, pace, learners, overlap_steps, outer, settings.ranks, settings.precision)
    except OverflowError:
        raise UsageError(
            "these numbers are too large or too small for a plan: check --params, --link and --merge-rate"
        ) from None
    console = Console()
    console.print(choices(needs, f"{counted(needs.learners, 'learner')}, {written(settings.params)} parameters"))
    console.print(needs.lines())
    say(
        "everything is computed from your options and constants, and nothing was measured: use `diloco doctor` to "
        "measure, and to compare with a run in progress\n",
        console,
    )
    show(console, needs)
    if json_file is not None:
        write_named(json_file, dumps(asdict(needs), indent=1) + "\n")
