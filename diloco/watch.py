"""`diloco watch`: the page of any run, or its curves elsewhere, by whoever may read its Redis."""

import asyncio
from pathlib import Path

import typer

from diloco.launcher.locate import locate
from diloco.launcher.page import served, way_to
from diloco.options import WatchProcess
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import UsageError
from diloco.pipeline.process import lifecycle
from diloco.tracking.follow import follow


async def _serve(settings: WatchProcess, url: str, run: str) -> None:
    stop = lifecycle.stop_event()
    async with open_bus(url, run) as bus, served(bus, settings, typer.echo, way_to(url)):
        typer.echo(f"watching run {run!r} until Ctrl-C; the run does not notice")
        await stop.wait()


def show(settings: WatchProcess, folder: Path | None, web: bool, to: str | None, into: Path | None) -> None:
    """Serve the page of the run that `locate` finds, or write its curves, until a signal.

    Raises:
        UsageError: there is no such run, or it is over; or as `follow`.
    """
    if web == (to is not None):
        raise UsageError(
            "say how, one of both: `diloco watch --web` serves a page, `--to tensorboard` or `--to wandb` writes "
            "curves; in a terminal: diloco status --watch"
        )
    if into is not None and to is None:
        raise UsageError("--into is the folder of --to: leave it out, or say where to")
    place = locate(settings, folder)
    if place.redis_url is None:
        raise UsageError(f"{place} has no Redis to watch: it is over. Its page: diloco report {place} --html FILE")
    if to is not None:
        follow(place.redis_url, place.run, to, into)
        return
    asyncio.run(_serve(settings, place.redis_url, place.run))
