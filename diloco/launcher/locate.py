"""Find a run: by Redis URL, by its output folder, or as the newest one in runs/."""

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import BaseModel, PositiveInt, ValidationError

from diloco.options import ViewSettings
from diloco.pipeline.bus.redis.run_list import connect_runs
from diloco.pipeline.errors import DilocoError, NotPermitted, UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.messages.wire import PartyName
from diloco.pipeline.methods import RunMethod
from diloco.pipeline.settings import BusSettings
from diloco.pipeline.view.page.join_command import LearnerLaunch
from diloco.pipeline.wrong_values import format_problem

RUNS = Path("runs")
# Written by the launcher while a run is live: Redis URL without secrets, run name, address of its page, pids, and how
# its learners were started.
RUN_FILE = "run.json"
REPORT_FILE = "report.json"
# What to do about a damaged `RUN_FILE`.
DAMAGED = "if that run is over, delete the file; if it is still running, use --redis-url and --run instead"
# Tolerance of `began_before`: the clock may have been set by at most this much since the machine was started.
CLOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run can be looked at: on Redis while it is live, in its folder afterwards."""

    run: str
    redis_url: str | None
    folder: Path | None
    page: str | None = None
    """Address of the page that `diloco run` serves; it has no token in it."""
    closing: bool = False
    """True if all processes have ended and the report is being written."""
    own: Mapping[str, LearnerLaunch] = field(default_factory=dict)
    """By learner: how `diloco run` has started it."""

    def __str__(self) -> str:
        return str(self.folder) if self.folder is not None else f"run {self.run!r}"


def without_secrets(url: str) -> str:
    """Return the URL with `***` for each password in it."""
    hidden = re.sub(r"://([^:/@?]*):[^/?]*@", r"://\1:***@", url)
    return re.sub(r"([?&](?:ssl_)?password=)[^&]*", r"\1***", hidden)


def is_running(pid: int) -> bool:
    """Return whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def began_before(pid: int, unix_s: float) -> bool:
    """Return whether a process began before this time, since its id may be reused. True where there is no /proc."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text().splitlines()
        booted_s = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    except (OSError, ValueError, IndexError, StopIteration):
        return True
    return booted_s + ticks / os.sysconf("SC_CLK_TCK") < unix_s + CLOCK_S


class RunFile(BaseModel):
    """The contents of `RUN_FILE`, in which the launcher describes a run under way."""

    redis_url: str | None = None
    run: PartyName = "run"
    method: RunMethod | None = None
    budget_tokens: PositiveInt | None = None
    page: str | None = None
    closing: bool = False
    ended: str = ""
    own: dict[PartyName, LearnerLaunch] = {}
    pids: dict[PartyName, PositiveInt]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file of an output folder.

        Raises:
            UsageError: the file is damaged.
        """
        try:
            return cls.model_validate(read_object(folder / RUN_FILE))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"{part}: " for part in first["loc"] if part != "[key]")
            raise _damaged(folder, f"{where}{format_problem(first)}") from error
        except UsageError as error:
            raise UsageError(error.found, DAMAGED) from error

    @classmethod
    def budget(cls, folder: Path) -> int:
        """Read the budget in tokens of a run that has no Redis to ask.

        Raises:
            UsageError: the file is damaged, or does not have it.
        """
        if (found := cls.read(folder).budget_tokens) is None:
            raise _damaged(folder, "budget_tokens: missing")
        return found


def _damaged(folder: Path, what: str) -> UsageError:
    return UsageError(f"{folder / RUN_FILE} is damaged: {what}", DAMAGED)


def is_output(folder: Path) -> bool:
    """Return whether this is an output folder of `diloco run`, live or not."""
    return any((folder / name).is_file() for name in (RUN_FILE, REPORT_FILE))


def is_live(folder: Path) -> bool:
    """Return whether a `diloco run` is live in this output folder."""
    if (folder / REPORT_FILE).is_file() or not (folder / RUN_FILE).is_file():
        return False
    launcher = RunFile.read(folder).pids.get("launcher")
    if launcher is None or not is_running(launcher):
        return False
    return began_before(launcher, (folder / RUN_FILE).stat().st_mtime)


def no_redis(place: Place) -> str:
    """Say why a place that `locate` found has no Redis."""
    if place.closing:
        return f"the run in {place} has ended, and its report is being written"
    if place.folder is not None and is_live(place.folder):
        return (
            f"the run in {place} runs without a Redis: use `diloco status {place}` to see it, and Ctrl-C in its "
            "terminal to end it"
        )
    return f"{place} is over already"


def ended_without_report(folder: Path) -> str:
    """Say how a run ended that has left no report in its output folder, and what to do."""
    ended = RunFile.read(folder).ended
    how = f"was {ended}" if ended else "ended without a report"
    said = f"the run in {folder} {how}; its logs are in {folder / 'logs'}"
    if any((folder / "checkpoints").glob("**/latest")):
        said += f". To continue from its last checkpoint, repeat the command with --out {folder}"
    return said


async def _only_run(url: str) -> str:
    """Return the name of the only run on a Redis, or raise as `locate`."""
    async with connect_runs(url) as runs:
        try:
            names = await runs.names()
        except NotPermitted:
            raise UsageError("this Redis user may not list the runs", "choose one with --run") from None
    if not names:
        raise DilocoError("no runs on this Redis", "start a syncer and learners with its URL, or check the URL")
    if len(names) > 1:
        raise UsageError(f"this Redis has the runs {', '.join(names)}", "choose one with --run")
    return names[0]


def locate(settings: BusSettings, folder: Path | None) -> Place:
    """Find the run that a command is about: by the folder, else the Redis URL, else the newest folder in runs/.

    If --run is given, only folders in runs/ of runs with that name count. Otherwise a command that only reads takes the
    only run on the Redis, and any other command the one with the default name.

    Raises:
        UsageError: there is no such run, or it ended without a report; or there are several runs, or this Redis user
            may not list them.
        DilocoError: the Redis has no run, or does not answer.
    """
    if folder is None:
        if (url := settings.bus_url()) is not None:
            guess = isinstance(settings, ViewSettings) and "run" not in settings.model_fields_set
            return Place(asyncio.run(_only_run(url)) if guess else settings.run, url, None)
        candidates = [file.parent for name in (RUN_FILE, REPORT_FILE) for file in RUNS.glob(f"*/{name}")]
        of_run = ""
        if "run" in settings.model_fields_set:
            candidates = [one for one in candidates if _name_in(one) == settings.run]
            of_run = f" {settings.run!r}"
        if not candidates:
            raise UsageError(
                f"no run{of_run} in ./{RUNS}: give its output folder, or pass --redis-url (or set DILOCO_REDIS_URL)"
            )
        folder = max(candidates, key=lambda found: found.stat().st_mtime)
    if (folder / REPORT_FILE).is_file():
        return Place(settings.run, None, folder)
    if not (folder / RUN_FILE).is_file():
        raise UsageError(
            f"{folder} is not an output folder of `diloco run`: it has neither {RUN_FILE} nor {REPORT_FILE}"
        )
    live = RunFile.read(folder)
    if not is_live(folder):
        raise UsageError(ended_without_report(folder))
    if live.closing:
        return Place(live.run, None, folder, closing=True)
    url = live.redis_url
    if url is not None and "***" in url:
        if (named := settings.bus_url()) is None:
            raise UsageError(f"the Redis of {folder} ({url}) has a password: set DILOCO_REDIS_URL")
        url = named
    return Place(live.run, url, folder, live.page, own=live.own)


def _name_in(folder: Path) -> str | None:
    """Return the run's name from its output folder; None if it cannot be read or is gone by now."""
    try:
        file = next(folder / name for name in (RUN_FILE, REPORT_FILE) if (folder / name).is_file())
        return read_object(file).get("run")
    except (StopIteration, UsageError):
        return None
