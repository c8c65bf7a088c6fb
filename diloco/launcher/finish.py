"""Conclude a run whose processes have ended: write the sampled text, picture and report, and print a summary."""

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from diloco.export import Globals, find_checkpoint, read_globals
from diloco.launcher.folder import PICTURE_FILE, SAMPLE_FILE, Folder
from diloco.launcher.launch import Child
from diloco.launcher.page import MODEL_FILE, PAGE_FILE, reporting_bugs, write_page
from diloco.launcher.report import Outcome, build, ledger_line, summary
from diloco.options import RunProcess
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.files.replacing import replace, write_named
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.wire import printable
from diloco.pipeline.process.signals import install_signal_handlers
from diloco.pipeline.redis_memory import VALUE_BYTES
from diloco.pipeline.units import as_bytes, counted
from diloco.pipeline.waiting import first_of
from diloco.syncer.checkpoints.loading import is_of
from diloco.syncer.checkpoints.places import Place
from diloco.workers.exchange.redis_access import read_run

SAMPLE_TOKENS = 300
TEMPERATURE, TOP_K = 0.8, 40
# Time in which a full disk may be given space, so that the last checkpoint is saved after all; and between two checks.
SAVE_AGAIN_S, RETRY_S = 600.0, 2.0
LINES = "\n\t"


def sample_text(found: Globals, prompt: str, seed: int) -> str:
    """Generate text with global parameters."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from diloco.workers.trainer.sample import load_model, sample

    loaded = load_model(found.folder, found.trainer, found.tensors)
    return sample(loaded, prompt, SAMPLE_TOKENS, TEMPERATURE, TOP_K, seed)


def _write(report: dict[str, Any], path: Path) -> list[str]:
    """Write a report to a file; return what is wrong if it cannot be written, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_named(path, dumps(report, indent=1) + "\n")
    except OSError as error:
        return [f"the report cannot be written to {path} ({error.strerror or error})"]
    return []


def tell_page(folder: Path) -> None:
    """Write a run's page next to its report, if its model was saved, and print its address."""
    if (folder / MODEL_FILE).is_file():
        typer.echo(f"page       {write_page(read_object(folder / MODEL_FILE), folder / PAGE_FILE)}")


def disk_full(folder: Path, elements: int, momentum: float) -> str:
    """Return that a folder's disk has no space for a checkpoint of so many elements, in words; "" if it has.

    momentum: the run's outer momentum; without it a checkpoint has only the values.
    """
    needed = VALUE_BYTES * elements * (2 if momentum else 1)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # the folder was moved or deleted
        return ""
    return f"disk full: {as_bytes(free)} free in {folder}, {as_bytes(needed)} needed" if free < needed else ""


async def _is_saved(bus: Bus, folder: Path, fragments: int) -> bool:
    """Return whether the newest checkpoint in a folder has the heads that are on the bus, or not all are there yet."""
    found = await bus.read_heads(range(fragments))
    heads = [(head.fragment, head.version, head.digest) for head in found if head is not None]
    try:
        return len(heads) < fragments or is_of(find_checkpoint(folder), heads)
    except UsageError:  # there is none, or it is damaged
        return False


async def save_again(bus: Bus, folder: Folder, syncers: Sequence[Child], tell: Callable[[str], None]) -> None:
    """Restart a syncer if the run's last state found no space on its disk, once it has: the run's Redis still has all.

    Gives up after `SAVE_AGAIN_S`, or at the next signal that requests an end; one more cancels the calling task. The
    syncers must have ended; none runs on return.
    """
    loop, task, given_up = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    assert task is not None  # noqa: S101  # this is a coroutine
    if (spec := await read_run(bus)) is None:
        return
    layout = layout_of(spec.tensors)
    is_saved = partial(_is_saved, bus, folder.path, len(layout.fragments))
    lacks_space = partial(disk_full, folder.path, layout.elements, spec.sync.outer_momentum)
    if await is_saved() or not (full := lacks_space()):
        return
    install_signal_handlers(loop, given_up, task.cancel)  # those until now asked for the run's end
    tell(
        f"the run's last state is not saved yet ({full}): free some space there within {SAVE_AGAIN_S / 60:g} min, or "
        "press Ctrl-C to give it up"
    )
    until = loop.time() + SAVE_AGAIN_S
    while (
        not given_up.is_set()
        and loop.time() < until
        and (any(syncer.alive for syncer in syncers) or not await is_saved())
    ):
        if not (any(syncer.alive for syncer in syncers) or lacks_space()):
            syncers[0].restart()
        await first_of(given_up, timeout_s=RETRY_S)
    for syncer in syncers:
        if syncer.alive:
            syncer.kill_group()


def conclude(outcome: Outcome, settings: RunProcess, folder: Folder) -> None:
    """Write and print the results of a finished run; what cannot be written is among its printed warnings.

    Raises:
        DilocoError: the run has saved no checkpoint, or not its last state, or the report could not be written.
    """
    from diloco.launcher.plot import draw

    typer.echo(f"all processes have ended; writing text, plot and report to {folder.path}")
    checkpoint: Place | None = None
    text = None
    # First, so that it is there even if sampling or drawing, which take seconds, fail.
    outcome.warnings += _write(build(outcome), folder.report)
    try:
        checkpoint = find_checkpoint(folder.path)
        with reporting_bugs("the text", outcome.warnings.append):
            text = sample_text(read_globals(str(checkpoint)), settings.prompt, settings.seed)
            replace(folder.path / SAMPLE_FILE, [text.encode() + b"\n"])
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
    unwritten = _write(whole, folder.report)
    if text is not None:
        typer.echo("\n--- text from the global parameters " + "-" * 44 + f"\n{printable(text, LINES)}\n" + "-" * 80)
    typer.echo(summary(report))
    typer.echo(f"picture    {whole['plot'] or 'none'}\nreport     {'none' if unwritten else folder.report}")
    try:
        tell_page(folder.path)
    except UsageError as error:
        unwritten.append(str(error))
    if settings.json_report is not None:
        unwritten += _write(whole, settings.json_report)
    if unsaved or checkpoint is None:
        lost = "the run's last state was not saved" if unsaved else "the run left no checkpoint"
        full = disk_full(folder.path, outcome.layout.elements if outcome.layout else 0, settings.outer_momentum)
        raise DilocoError(f"{lost}{full and f' ({full})'}; see the logs in {folder.logs} for the reason")
    if unwritten:
        raise DilocoError(unwritten[0])
