"""`diloco watch`: serve the page of any run whose Redis this user may read, or write its curves to a tracker."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer

from diloco.launcher.locate import Place, is_live, is_output, locate, no_redis
from diloco.launcher.page import redis_route, served
from diloco.options import RunFolder, WatchProcess, takes
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import BusError, DilocoError, UsageError
from diloco.pipeline.process import signals
from diloco.pipeline.waiting import first_of
from diloco.tracking.follow import follow
from diloco.tracking.trackers import TRACKERS
from diloco.workers.exchange.redis_access import read_run

# Time between two checks of whether the run is over.
LOOK_S = 1.0
# A run whose folder is gone counts as ended once its Redis has not answered for this long; less may be a failover.
AWAY_S = 60.0

To = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="|".join(TRACKERS), help="Write curves to this tracker until the run is finished or Ctrl-C"
    ),
]
Into = Annotated[
    Path | None,
    typer.Option(
        "--into",
        metavar="FOLDER",
        help="Folder for the files of --to, by which a later call continues them (default: tracked/TO/RUN)",
    ),
]


async def _serve(settings: WatchProcess, place: Place) -> None:
    """Serve the page until a signal, even beyond the run's end, so that its last state can be looked at.

    If somebody moves or deletes the output folder meanwhile, the page is served for as long as the run's Redis answers.

    Raises:
        UsageError: the run has ended without a report; the message comes from `locate`.
        BadMessage: the run was made by another build.
        DilocoError: both the run's folder and its Redis are gone.
    """
    stop, said, lost, url = signals.stop_event(), False, False, place.redis_url
    answered_s = time.monotonic()
    assert url is not None  # noqa: S101  # there is something to watch
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(open_bus(url, place.run))
        await read_run(bus)  # if this user or build cannot read the run, fail with a message: the page would stay empty
        collector, _ = await stack.enter_async_context(served(bus, settings, typer.echo, redis_route(url)))
        typer.echo(f"watching run {place.run!r} until Ctrl-C; this does not affect the run")
        while not stop.is_set():
            over = collector.model.over
            if over and not said:
                report = f"; its report: diloco report {place.folder}" if place.folder is not None and not lost else ""
                typer.echo(f"run {place.run!r} is finished; its page stays up until Ctrl-C{report}")
            elif not over and place.folder is not None and not is_output(place.folder):
                if not lost:
                    typer.echo(
                        f"{place.folder} was moved or deleted: watching its run for as long as its Redis answers"
                    )
                lost = True
                try:
                    await bus.read_state()
                    answered_s = time.monotonic()
                except BusError as error:
                    if time.monotonic() - answered_s > AWAY_S:
                        raise _gone(place, error) from error
            elif not over and place.folder is not None and not is_live(place.folder):
                locate(settings, place.folder)
                typer.echo(f"run {place.run!r} is over, but its end was not seen; use diloco report {place.folder}")
                return
            said = over  # a run may be extended, and end a second time
            await first_of(stop, timeout_s=LOOK_S)


def _gone(place: Place, error: BusError) -> DilocoError:
    gone = f"{place.folder} was moved or deleted, and the Redis of its run {place.run!r} no longer answers"
    return DilocoError(gone, "as far as can be seen from here, the run has ended", str(error))


@takes(WatchProcess)
def command(settings: WatchProcess, folder: RunFolder = None, to: To = None, into: Into = None) -> None:
    """Serve the page of any run from this machine, until Ctrl-C. It needs only the right to read the run's Redis.

    When the run is finished, the command says so and keeps the page up.

    This does not affect learners and syncers. `diloco run` and `diloco syncer` already serve the same page.

    With --to, write the run's curves to TensorBoard, Weights & Biases, trackio or MLflow instead. To watch in a
    terminal, use `diloco status --watch`.

    Example: diloco watch --redis-url redis://HOST:6379 --run my-run
    """
    if into is not None and to is None:
        raise UsageError("--into is the folder for --to: leave it out, or pass --to")
    place = locate(settings, folder)
    if place.redis_url is None:
        raise UsageError(
            f"no Redis to watch: {no_redis(place)}. For the page of a run that is over, use diloco report {place} "
            "--html FILE"
        )
    if to is not None:
        follow(place.redis_url, place.run, to, into)
        return
    asyncio.run(_serve(settings, place))
