"""`diloco plan`: what a run needs. The arithmetic is `pipeline.needs`'s."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field
from rich.console import Console
from rich.table import Table

from diloco.options import PANELS, RunSettings, takes
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.wire import Codec, GlobalCodec, OuterName
from diloco.pipeline.needs import CHOSEN, Needs, Site, needs_of, pace_of
from diloco.pipeline.settings import SyncSettings, defaults

USUAL = defaults(SyncSettings) | defaults(RunSettings)


class PlanSettings(Site):
    """What is asked of a plan beside its site."""

    learners: int = Field(USUAL["learners"], ge=1, le=4096, description="Number of learners M")
    overlap_steps: int = Field(USUAL["overlap_steps"], ge=0, description="Inner steps tau that a sync may hide behind")
    codec: Literal["auto", Codec] = Field("auto", description="Of deltas; auto: bf16 unless the link wants less")
    global_codec: GlobalCodec = Field(USUAL["global_codec"], description="Of the globals that learners pull")
    outer: OuterName = Field(
        USUAL["outer"], description="Outer optimizer; all but nesterov multiply matrices on the syncers"
    )


PANELS[PlanSettings] = "The run"


def choices(needs: Needs, title: str) -> Table:
    """What is chosen, and why, as a table."""
    shown = Table(title=title, show_lines=True)
    for name in ("choose", "", "why"):
        shown.add_column(name)
    for name, heading in CHOSEN.items():
        if name in needs.why:
            shown.add_row(heading, str(getattr(needs, name)), needs.why[name])
    return shown


@takes(PlanSettings)
def command(
    settings: PlanSettings,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write it as JSON")] = None,
) -> None:
    """What to choose (H, P, codec, syncers, Redis nodes) for so many learners, and what it takes.

    How many learners to have of so many chips is `diloco simulate plan`'s: it simulates their failures.

    Example: diloco plan --learners 4 --params 70B --step-time 3s --link 5Gbps --outer nesterov
    """
    try:
        pace = pace_of(
            settings, settings.learners, settings.overlap_steps, settings.codec, settings.global_codec, settings.outer
        )
        needs = needs_of(settings, pace, settings.learners, settings.outer)
    except OverflowError:
        raise UsageError("no plan has numbers of this size: look at --params, --link and --merge-rate") from None
    console = Console()
    console.print(choices(needs, f"{needs.learners} learners, {settings.params / 1e9:g}B parameters"))
    console.print(needs.lines())
    for warning in needs.warnings:
        console.print(f"warning: {warning}")
    if json_file is not None:
        json_file.write_text(dumps(asdict(needs), indent=1) + "\n")
