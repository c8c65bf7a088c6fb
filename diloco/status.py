"""`diloco status`: a live run as its display shows it, a finished one by its report."""

import asyncio
from pathlib import Path

import typer
from rich.console import Console

from diloco.launcher.baseline import baseline_status
from diloco.launcher.display import render
from diloco.launcher.locate import REPORT_FILE, locate
from diloco.launcher.report import summary
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import DilocoError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.settings import BusSettings
from diloco.pipeline.view.status import Status, read_status


async def _read(url: str, run: str, known: bool) -> Status:
    """The status of a run; `known`: a launcher is at work on it, whatever is on the bus so far.

    Raises:
        DilocoError: nothing on this Redis is of that run.
    """
    async with open_bus(url, run) as bus:
        there = known or await bus.read_spec() is not None
        status = await read_status(bus, LoopClock())
    if not (there or status["syncers"] or status["learners"] or status["phase"] != "waiting"):
        raise DilocoError(f"no run {run!r} on this Redis: is it --run?")
    return status


def show(settings: BusSettings, folder: Path | None, as_json: bool) -> None:
    """Print the state of the run that `locate` finds.

    Raises:
        DilocoError: as `locate`, or nothing on the Redis is of that run.
    """
    place = locate(settings, folder)
    if place.redis_url is not None:
        status = asyncio.run(_read(place.redis_url, place.run, known=place.folder is not None))
    elif place.folder is not None and (place.folder / REPORT_FILE).is_file():
        report = read_object(place.folder / REPORT_FILE)
        typer.echo(dumps(report) if as_json else summary(report))
        return
    else:
        assert place.folder is not None  # noqa: S101  # a place without a Redis URL has a folder
        status = baseline_status(place.folder)
    if as_json:
        typer.echo(dumps(status))
    else:
        Console().print(render(status))
