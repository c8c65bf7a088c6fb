"""`diloco status`: a live run as its display shows it, a finished one by its report."""

import asyncio
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.live import Live

from diloco.launcher.baseline import baseline_status
from diloco.launcher.display import render
from diloco.launcher.locate import REPORT_FILE, locate
from diloco.launcher.report import summary
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusError, DilocoError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.run import Phase
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


def _find(settings: BusSettings, folder: Path | None) -> tuple[Status | None, dict[str, Any]]:
    """The status of a run, and {}; of a finished one None, and its report.

    Raises:
        DilocoError: as `show`.
    """
    place = locate(settings, folder)
    if place.redis_url is not None:
        return asyncio.run(_read(place.redis_url, place.run, known=place.folder is not None)), {}
    assert place.folder is not None  # noqa: S101  # a place without a Redis URL has a folder
    if (place.folder / REPORT_FILE).is_file():
        return None, read_object(place.folder / REPORT_FILE)
    return baseline_status(place.folder), {}


def show(settings: BusSettings, folder: Path | None, as_json: bool, every_s: float | None = None) -> None:
    """Print the state of the run that `locate` finds.

    Args:
        settings: where its Redis is.
        folder: its output folder, if any.
        as_json: instead of text; one line each time.
        every_s: again after so long, until the run is finished, or Ctrl-C; None: once.

    Raises:
        DilocoError: as `locate`, or nothing on the Redis is of that run. Later on only what went wrong is shown.
    """
    console = Console()
    found = _find(settings, folder)
    if every_s is None:
        _put(console, *found, as_json)
        return
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    try:
        if live is not None:
            live.start()
        while True:
            status, report = found
            if live is not None and status is not None:
                live.update(render(status), refresh=True)
            else:
                _put(console, status, report, as_json)
            if status is None or status["phase"] == Phase.FINISHED:
                return
            time.sleep(every_s)
            found = _again(settings, folder, every_s)
    except KeyboardInterrupt:
        pass  # whoever looks has seen enough
    finally:
        if live is not None:
            live.stop()


def _again(settings: BusSettings, folder: Path | None, every_s: float) -> tuple[Status | None, dict[str, Any]]:
    """As `_find`, once Redis can be reached again."""
    while True:
        try:
            return _find(settings, folder)
        except BusError as error:
            typer.echo(f"Redis does not answer ({error}); asking again every {every_s:g} s", err=True)
        time.sleep(every_s)


def _put(console: Console, status: Status | None, report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(dumps(report if status is None else status))
    elif status is None:
        typer.echo(summary(report))
    else:
        console.print(render(status))
