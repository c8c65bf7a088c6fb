"""`diloco status`: show a live run like its display does, and a finished one by its report."""

import asyncio
import math
import re
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from diloco.launcher.baseline import baseline_status
from diloco.launcher.display import cost_words, render, say
from diloco.launcher.locate import REPORT_FILE, Place, locate
from diloco.launcher.page import PAGE_FILE, redis_route
from diloco.launcher.report import read_report, summary
from diloco.options import AsJson, Price, RunFolder, SettingsCommand, ViewSettings, takes
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusError, DilocoError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.view.goodput import cost
from diloco.pipeline.view.status import Status, is_missed, present
from diloco.pipeline.view.status_reader import read_status

# A Redis that is up answers within this time; after it, the user sees a message about what the command waits for.
SOON_S = 2.0
# Seconds for which --watch awaits an evaluator's last measurement.
MEASURED_WITHIN_S = 10.0
# Interval of --watch without a number.
WATCH_S = 2


@dataclass(frozen=True, slots=True)
class _RunInfo:
    """What is known about a run: its status, or its report, or neither while the report is being written."""

    place: Place
    status: Status | None = None
    syncers_page: str | None = None
    """Page of a syncer of the run, as the syncer has announced it."""
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def closing(self) -> bool:
        """Return whether the report is still being written."""
        return self.status is None and not self.report

    @property
    def over(self) -> bool:
        """Return whether nothing will change any more."""
        return bool(self.report) or (self.status is not None and self.status["phase"] == Phase.FINISHED)

    @property
    def unmeasured(self) -> bool:
        """Return whether an evaluator has not measured a finished run's last model yet."""
        last = None if self.status is None else self.status["evaluation"]
        return last is not None and not last["final"]

    def page(self) -> str | None:
        """Return the address of the run's page: of the file in its folder once it is over, else of a live page."""
        kept = None if self.place.folder is None else self.place.folder / PAGE_FILE
        if self.report and kept is not None and kept.is_file():
            return kept.resolve().as_uri()
        return self.place.page or self.syncers_page

    def as_json(self, price: float | None) -> str:
        """Return one line of JSON, with the page's address if it is known, and what the run costs at a price."""
        if self.closing:
            return dumps({"run": self.place.run, "phase": Phase.CLOSING, "report": str(self._report_file())})
        page, _, host = (self.place.page or self.syncers_page or "").partition(" on ")
        more = ({"page": page} if page else {}) | ({"page_host": host} if host else {})
        money = {} if price is None else {"cost": cost((self.status or self.report).get("goodput"), price)}
        return dumps(({**self.status, **more} if self.status is not None else self.report) | money)

    def as_text(self, price: float | None) -> Iterator[RenderableType]:
        """Yield the parts of the human-readable status."""
        if self.closing:
            yield Text(
                f"run {self.place.run!r} in {self.place.folder} has ended and is closing: its report will be "
                f"{self._report_file()}"
            )
        elif self.status is not None:
            yield render(self.status)
            if price is not None:
                yield Text(f"cost       {cost_words(self.status['goodput'], price)}")
        else:
            yield Text(summary(self.report, price))
        if page := self.page():
            yield Text(f"page       {page}{'; elsewhere: diloco watch' if ' on ' in page else ''}")
        if (status := self.status) is not None and status["phase"] in ("waiting", Phase.RUNNING):
            for silent in [one["id"] for one in present(status["learners"]) if is_missed(one)][:1]:
                route = redis_route(self.place.redis_url or "", self.place.own)
                yield Text(f"restart    {''.join(route.start('learner', status['run'], silent, status['own_loop']))}")

    def _report_file(self) -> Path:
        assert self.place.folder is not None  # noqa: S101  # only a folder says that it closes
        return self.place.folder / REPORT_FILE


async def _read(url: str, run: str, known: bool) -> tuple[Status, str | None]:
    """Return the status of a run, and the page that one of its syncers serves.

    known: a launcher works on the run, so that it exists even if nothing is on the bus yet.

    Raises:
        DilocoError: this Redis has nothing of that run.
    """
    clock = LoopClock()
    began_s = clock.now()
    async with open_bus(url, run) as bus:
        there = known or await bus.read_spec() is not None
        away = (
            clock.now() - began_s > SOON_S
        )  # Redis was down until now, so parties that could not write must not be shown as silent
        status = await read_status(bus, bus.clock, answers_s=0.0 if away else math.inf)
        pages = await bus.read_pages()
    check_there(status, there)
    return status, _nearest(pages, [one["id"] for one in status["syncers"] if one["leads"]])


def _nearest(pages: Mapping[str, str], leads: Collection[str]) -> str | None:
    """Return the syncers' page to show here: one that can be reached from here if there is any, best the lead's."""
    here = {name: page.removesuffix(f" on {socket.gethostname()}") for name, page in pages.items()}
    return here[min(here, key=lambda name: (" on " in here[name], name not in leads))] if here else None


def check_there(status: Status, agreed: bool) -> None:
    """Refuse the status of a run that does not exist; agreed: the run has a spec.

    Raises:
        DilocoError: this Redis has nothing of that run.
    """
    if not (agreed or status["syncers"] or status["learners"] or status["phase"] != "waiting"):
        raise DilocoError(f"this Redis has no run {status['run']!r}: nothing of it has started yet, or check --run")


@contextmanager
def _patience() -> Iterator[None]:
    """Say that Redis is being waited for if the block takes longer than `SOON_S`."""
    said = "waiting for Redis, which has not answered yet"
    timer = threading.Timer(SOON_S, typer.echo, (said,), {"err": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _find(settings: ViewSettings, folder: Path | None) -> _RunInfo:
    """Return the status or report of the run that `locate` finds.

    Raises:
        DilocoError: raised by `locate`, or the Redis has nothing of that run.
    """
    with _patience():
        place = locate(settings, folder)
    if place.redis_url is not None:
        try:
            with _patience():
                read = asyncio.run(_read(place.redis_url, place.run, known=place.folder is not None))
            return _RunInfo(place, *read)
        except BusError:
            if place.folder is None:
                raise
            again = locate(
                settings, place.folder
            )  # a run's embedded Redis ends with it: then this is not an outage, and its folder shows the end
            if again.redis_url is not None:
                raise
            place = again
    assert place.folder is not None  # noqa: S101  # a place without a Redis URL has a folder
    if (place.folder / REPORT_FILE).is_file():
        return _RunInfo(place, report=read_report(place.folder / REPORT_FILE))
    return _RunInfo(place) if place.closing else _RunInfo(place, baseline_status(place.folder))


class _Watching(SettingsCommand):
    """A command whose option `--watch` may be given without a number, which typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default number after a `--watch` not followed by a number: the next argument may be DIR."""
        following = [*args[1:], ""]
        for at in reversed([at for at, one in enumerate(args) if one == "--watch"]):
            if not re.fullmatch(r"[-+]?(\.?[0-9][0-9.]*[a-z]*|inf|nan)", following[at]):
                args = [*args[: at + 1], str(WATCH_S), *args[at + 1 :]]
        return super().parse_args(ctx, args)


Every = Annotated[
    int | None,
    typer.Option(
        "--watch",
        metavar="[SECONDS]",
        min=1,
        help=f"Repeat at this interval in seconds (default {WATCH_S}) until the run is finished or Ctrl-C",
    ),
]


@takes(ViewSettings)
def command(
    settings: ViewSettings,
    folder: RunFolder = None,
    as_json: AsJson = False,
    every_s: Every = None,
    price: Price = None,
) -> None:
    """Show a live run and the address of its page, or the report of a finished one."""
    console = Console()
    found = _find(settings, folder)
    if every_s is None:
        _put(console, found, as_json, price)
        return
    over_s = 0.0
    settings = settings.model_copy(update={"run": found.place.run})  # the same run, whichever others begin meanwhile
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    try:
        if live is not None:
            live.start()
        while True:
            if live is not None and (found.status is not None or not found.over):
                # The lines come first: a screen that is too small loses what comes last.
                parts = sorted(found.as_text(price), key=lambda part: not isinstance(part, Text))
                live.update(Group(*parts), refresh=True)
            else:
                _put(console, found, as_json, price)
            if found.over:
                over_s = over_s or time.monotonic()
                if not found.unmeasured or time.monotonic() - over_s > MEASURED_WITHIN_S:
                    return
            time.sleep(every_s)
            found = _again(settings, found.place.folder or folder, every_s)
    except KeyboardInterrupt:
        pass  # the user ends the display by Ctrl-C, which is not an error
    finally:
        if live is not None:
            live.stop()


command.cls = _Watching  # type: ignore[attr-defined]  # instead of the class that `takes` sets


def _again(settings: ViewSettings, folder: Path | None, every_s: float) -> _RunInfo:
    """Call `_find` until Redis can be reached."""
    while True:
        try:
            return _find(settings, folder)
        except BusError as error:
            typer.echo(f"Redis is not answering ({error}); retrying every {every_s:g} s", err=True)
        time.sleep(every_s)


def _put(console: Console, found: _RunInfo, as_json: bool, price: float | None) -> None:
    if as_json:
        typer.echo(found.as_json(price))
        return
    for part in found.as_text(price):
        if isinstance(part, Text) and "\n" in part.plain:  # a report
            say(part, console)
        else:  # a command or an address can be copied only if it is whole
            console.print(part, soft_wrap=isinstance(part, Text))
