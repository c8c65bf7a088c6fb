"""`diloco watch --web`: the page of any run, by whoever may read its Redis."""

import asyncio
from pathlib import Path

import typer

from diloco.launcher.locate import locate
from diloco.launcher.page import served
from diloco.options import WatchProcess
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import UsageError
from diloco.pipeline.process import lifecycle


async def _serve(settings: WatchProcess, url: str, run: str) -> None:
    stop = lifecycle.stop_event()
    async with open_bus(url, run) as bus, served(bus, settings, typer.echo):
        typer.echo(f"watching run {run!r} until Ctrl-C; the run does not notice")
        await stop.wait()


def show(settings: WatchProcess, folder: Path | None, web: bool) -> None:
    """Serve the page of the run that `locate` finds, until a signal.

    Raises:
        UsageError: there is no such run, or it is over.
    """
    if not web:
        raise UsageError("say how: `diloco watch --web` serves a page; in a terminal: diloco status")
    place = locate(settings, folder)
    if place.redis_url is None:
        raise UsageError(f"{place} has no Redis to watch: it is over. Its page: diloco report {place} --html FILE")
    asyncio.run(_serve(settings, place.redis_url, place.run))
