"""`diloco report`: a finished run's summary, or its page as one file.

The page is that of the run's last moment, where `diloco run` watched it. Of a run that it did not start there is the
tape, in a folder of --tape-dir.
"""

import math
from pathlib import Path
from typing import Any

import typer

from diloco.launcher.locate import REPORT_FILE, is_live, locate
from diloco.launcher.page import MODEL_FILE, write_page
from diloco.launcher.report import summary
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.messages.run import Evaluation, Event
from diloco.pipeline.settings import BusSettings
from diloco.pipeline.view.page.from_tape import model_of_tape
from diloco.pipeline.view.page.model import Model
from diloco.syncer.checkpoints.loading import NoCheckpoint, load_checkpoint
from diloco.tape import archive_of, read_archive


def show(settings: BusSettings, folder: Path | None, html: Path | None) -> None:
    """Print the summary of a finished run, or write its page.

    Raises:
        UsageError: there is no such run, it goes on, or it has left nothing to show.
    """
    if folder is None:
        folder = locate(settings.model_copy(update={"redis_url": None}), None).folder
    assert folder is not None  # noqa: S101  # without a Redis URL it is one
    if is_live(folder):
        raise UsageError(f"the run in {folder} goes on: `diloco run` has printed the address of its page")
    if html is not None:
        typer.echo(write_page(model_of(folder), html))
    elif (folder / REPORT_FILE).is_file():
        typer.echo(summary(read_object(folder / REPORT_FILE)))
    else:
        raise UsageError(f"{folder} has no {REPORT_FILE}; a page can be made of a tape: --html FILE")


def model_of(folder: Path) -> Model:
    """The page's model of a run that is over.

    Raises:
        UsageError: the folder has neither a recorded page nor a tape with a merge.
    """
    if (folder / MODEL_FILE).is_file():
        model = read_object(folder / MODEL_FILE)
        if model.get("coarse") and model.get("run"):
            return model
    archive = archive_of(folder)
    if archive is None:
        raise UsageError(f"{folder} holds neither {MODEL_FILE} nor a tape (*.msgpack): there is nothing to show")
    layout, events, evaluations = None, list[Event](), list[Evaluation]()
    try:
        checkpoint = load_checkpoint(str(folder))
    except NoCheckpoint:
        pass  # a folder of --tape-dir has none
    else:
        layout = checkpoint.layout
        if (folder / REPORT_FILE).is_file():  # its times are from the run's first step on, which the checkpoint knows
            report, start_s = read_object(folder / REPORT_FILE), checkpoint.state.started_unix_s
            events = [_event(one, start_s) for one in report.get("events", ())]
            evaluations = [_evaluation(one, start_s) for one in report.get("evaluations", ())]
    found = model_of_tape(folder.resolve().name, read_archive(archive), layout, events, evaluations)
    if found is None:
        raise UsageError(f"the tape in {archive} has no merge: there is nothing to show")
    return found


def _event(told: dict[str, Any], start_s: float) -> Event:
    return Event(name=told["name"], who=told["who"], detail=told["detail"], unix_s=start_s + told["elapsed_s"])


def _evaluation(told: dict[str, Any], start_s: float) -> Evaluation:
    elapsed_s, loss = told["elapsed_s"], told["loss"]
    return Evaluation(
        loss=math.nan if loss is None else loss,
        tokens=told["tokens"],
        versions=(),
        unix_s=start_s + elapsed_s,
        elapsed_s=elapsed_s,
        final=told["final"],
    )
