"""`diloco report`: print a run's summary, or write its page as one file.

For a live run, or if a Redis is named, everything is read from Redis. For a run that is over, its output folder has the
report and the page of its last moment; if `diloco run` did not start it, there is only its tape, in a --tape-dir.
"""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from diloco.launcher.display import say
from diloco.launcher.locate import REPORT_FILE, RUN_FILE, Place, ended_without_report, is_live, locate
from diloco.launcher.page import MODEL_FILE, folder_of_page, redis_route, write_page
from diloco.launcher.report import read_report, summary, summary_so_far
from diloco.options import Price, ViewSettings, takes
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.view.page.collector import MAX_READ, RunReader
from diloco.pipeline.view.page.from_tape import model_of_tape
from diloco.pipeline.view.page.model import Model, PageModel
from diloco.pipeline.view.status import Status
from diloco.status import check_there
from diloco.syncer.checkpoints.loading import NoCheckpoint, load_checkpoint
from diloco.tape import archive_of, read_archive

ReportFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR",
        help="Output folder of `diloco run` or `diloco chaos`, or a syncer's --tape-dir (default: the newest in runs/)",
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write the run's page to this file, or into this folder as report.html, and print its address. An "
        "output folder holds only its own run's page: without DIR, `--html runs/X` shows the run in runs/X",
    ),
]


@takes(ViewSettings)
def command(settings: ViewSettings, folder: ReportFolder = None, html: Html = None, price: Price = None) -> None:
    """Print the report of a run, finished or not. With --html, write its page as one file, which needs no server.

    The run is the one in DIR, otherwise the one on the given Redis, otherwise the newest in runs/. The report of a live
    run, or of a run on a given Redis, uses only its Redis.

    Example: diloco report --redis-url redis://HOST:6379 --run my-run
    """
    if folder is not None and not folder.is_dir():
        raise UsageError(f"the folder {folder} does not exist")
    if html is not None and (its := folder_of_page(html)) is not None:
        if folder is None and settings.bus_url() is None and "run" not in settings.model_fields_set:
            folder = its
        elif folder is None or folder.resolve() != its.resolve():
            raise UsageError(
                f"{its} is an output folder, which holds the page of its own run (diloco report {its} --html {its}): "
                "choose a different file or folder for this run's page"
            )
    if folder is None or is_live(folder):
        place = locate(settings, folder)
        if place.redis_url is not None:
            _tell(*asyncio.run(_poll(place.redis_url, place.run, known=place.folder is not None)), place, html, price)
            return
        folder = place.folder
        assert folder is not None  # noqa: S101  # a place without a Redis URL has a folder
        if place.closing:
            raise DilocoError(f"the run in {folder} has ended: {folder / REPORT_FILE} is being written; try again soon")
        if is_live(folder):
            raise UsageError(f"the run in {folder} runs without a Redis: use diloco status {folder}")
    if html is not None:
        typer.echo(write_page(model_of(folder), html))
    elif (folder / REPORT_FILE).is_file():
        say(summary(read_report(folder / REPORT_FILE), price))
    else:
        why = ended_without_report(folder) if (folder / RUN_FILE).is_file() else f"{folder} has no {REPORT_FILE}"
        raise UsageError(why, "to create a page from its tape, pass --html FILE")


async def _poll(url: str, run: str, known: bool) -> tuple[Model, Status]:
    """Read the page's model of a run and its status from its Redis; known: a launcher works on the run.

    Raises:
        DilocoError: this Redis has nothing of that run.
        BusError: the Redis cannot be read.
    """
    async with open_bus(url, run) as bus:
        reader, model = RunReader(bus, bus.clock, None), PageModel(run, redis_route(url))
        while True:
            poll = await reader.poll()
            model.see(poll)
            if (
                max(map(len, (poll.records, poll.events, poll.evaluations))) < MAX_READ
            ):  # a full read may not be the last one
                break
    check_there(poll.status, known or bool(poll.shares))
    model.patch()
    return model.snapshot(), poll.status


def _tell(model: Model, status: Status, place: Place, html: Path | None, price: float | None) -> None:
    if html is None:
        say(summary_so_far(status, model["curves"].values(), price))
        if place.page:
            typer.echo(f"page       {place.page}")
        return
    if status["phase"] != Phase.FINISHED:
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        model |= {"notes": [f"This page is a snapshot: it shows the run as of {now}.", *model["notes"]]}
    typer.echo(write_page(model, html))


def model_of(folder: Path) -> Model:
    """Return the page's model of a run that is over, from its recorded page or else from its tape.

    Raises:
        UsageError: the folder has neither a recorded page nor a tape with a merge.
    """
    if (folder / MODEL_FILE).is_file():
        model = read_object(folder / MODEL_FILE)
        if model.get("coarse") and model.get("run"):
            return model
    archive = archive_of(folder)
    if archive is None:
        raise UsageError(f"{folder} has neither {MODEL_FILE} nor a tape (*.msgpack), so there is nothing to show")
    try:
        layout = load_checkpoint(str(folder)).layout
    except NoCheckpoint:
        layout = None  # a --tape-dir has no checkpoint
    found = model_of_tape(folder.resolve().name, read_archive(archive), layout)
    if found is None:
        raise UsageError(f"the tape in {archive} has no merges, so there is nothing to show")
    return found
