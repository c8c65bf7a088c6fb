"""Conclude a run whose processes have ended: write the sampled text, picture and report, and print a summary."""

import os
from pathlib import Path
from typing import Any

import typer

from diloco.export import Globals, find_checkpoint, read_globals
from diloco.launcher.folder import PICTURE_FILE, SAMPLE_FILE, Folder
from diloco.launcher.page import MODEL_FILE, PAGE_FILE, reporting_bugs, write_page
from diloco.launcher.report import Outcome, build, ledger_line, summary
from diloco.options import RunProcess
from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.wire import printable
from diloco.pipeline.units import counted
from diloco.syncer.checkpoints.loading import is_of
from diloco.syncer.checkpoints.places import Place

SAMPLE_TOKENS = 300
TEMPERATURE, TOP_K = 0.8, 40
LINES = "\n\t"


def sample_text(found: Globals, prompt: str, seed: int) -> str:
    """Generate text with global parameters."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from diloco.workers.trainer.sample import load_model, sample

    loaded = load_model(found.folder, found.trainer, found.tensors)
    return sample(loaded, prompt, SAMPLE_TOKENS, TEMPERATURE, TOP_K, seed)


def _write(report: dict[str, Any], path: Path) -> None:
    """Write a report to a file.

    Raises:
        DilocoError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dumps(report, indent=1) + "\n")
    except OSError as error:
        raise DilocoError(f"the report cannot be written to {path}", said=str(error)) from error


def tell_page(folder: Path) -> None:
    """Write a run's page next to its report, if its model was saved, and print its address."""
    if (folder / MODEL_FILE).is_file():
        typer.echo(f"page       {write_page(read_object(folder / MODEL_FILE), folder / PAGE_FILE)}")


def conclude(outcome: Outcome, settings: RunProcess, folder: Folder) -> None:
    """Write and print the results of a finished run.

    Raises:
        DilocoError: the run has saved no checkpoint, or not its last state (the report is written all the same), or the
            report cannot be written.
    """
    from diloco.launcher.plot import draw

    typer.echo(f"all processes have ended; writing text, plot and report to {folder.path}")
    checkpoint: Place | None = None
    text = None
    _write(
        build(outcome), folder.report
    )  # first, so that it is there even if sampling or drawing, which take seconds, fail
    try:
        checkpoint = find_checkpoint(folder.path)
        with reporting_bugs("the text", outcome.warnings.append):
            text = sample_text(read_globals(str(checkpoint)), settings.prompt, settings.seed)
            (folder.path / SAMPLE_FILE).write_text(text + "\n")
    except UsageError as error:
        outcome.warnings.append(str(error))
    outcome.checkpoint = None if checkpoint is None else str(checkpoint)
    unsaved = checkpoint is not None and not is_of(checkpoint, outcome.ledger_inputs.heads)
    if unsaved:
        outcome.warnings.append(
            f"the run's last state was not saved: {checkpoint} and the text are from an earlier state"
        )
    report = build(outcome)
    picture = folder.path / PICTURE_FILE
    shown = ("learner_killed", "learner_started", "learner_died", "syncer_died")
    kept = [event for event in report["events"] if event["name"] in shown]
    loss = report["global_val_loss"]
    title = f"{report['method']}, {counted(len(report['learners']), 'learner')}"
    title = title if loss is None else f"{title}: global validation loss {loss:.3f}"
    with reporting_bugs("the picture", report["warnings"].append):
        draw(report, kept, title, ledger_line(report), picture)
    whole = report | {"sample": text, "plot": str(picture) if picture.is_file() else None}
    _write(whole, folder.report)
    if text is not None:
        typer.echo("\n--- text from the global parameters " + "-" * 44 + f"\n{printable(text, LINES)}\n" + "-" * 80)
    typer.echo(summary(report))
    typer.echo(f"picture    {whole['plot'] or 'none'}\nreport     {folder.report}")
    tell_page(folder.path)
    if settings.json_report is not None:
        _write(whole, settings.json_report)
    if unsaved:
        raise DilocoError(f"the run's last state was not saved; see the logs in {folder.logs} for the reason")
    if checkpoint is None:
        raise DilocoError(f"the run left no checkpoint; see the logs in {folder.logs} for the reason")
