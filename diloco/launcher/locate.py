"""Finding a run: by Redis URL, by its output folder, or the newest one in runs/."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import BaseModel, PositiveInt, ValidationError

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.messages.wire import PartyName
from diloco.pipeline.methods import RunMethod
from diloco.pipeline.settings import BusSettings, ServerSettings
from diloco.pipeline.view.page.join_command import Started
from diloco.pipeline.wrong_values import told

RUNS = Path("runs")
RUN_FILE = "run.json"
"""Written by the launcher while a run is live: Redis URL without secrets, run name, address of its page, pids, and how
its learners were started."""
REPORT_FILE = "report.json"
DAMAGED = "if that run is over, delete the file; if it goes on, look at it by --redis-url and --run"
"""What to do about a damaged `RUN_FILE`."""
CLOCK_S = 60.0
"""The clock may have been set since the machine was started, by so much at most."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run can be looked at: on Redis while it is live, in its folder afterwards."""

    run: str
    redis_url: str | None
    folder: Path | None
    page: str | None = None
    """Address of the page that `diloco run` serves; it has no token in it."""
    closing: bool = False
    """All of it has ended, and its report is being written."""
    own: Mapping[str, Started] = field(default_factory=dict)
    """By learner that `diloco run` has started: how."""

    def __str__(self) -> str:
        return str(self.folder) if self.folder is not None else f"run {self.run!r}"


def without_secrets(url: str) -> str:
    """The URL with `***` for its password, wherever it stands."""
    hidden = re.sub(r"://([^:/@?]*):[^/?]*@", r"://\1:***@", url)
    return re.sub(r"([?&](?:ssl_)?password=)[^&]*", r"\1***", hidden)


def is_running(pid: int) -> bool:
    """Whether there is a process of this id."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def began_before(pid: int, unix_s: float) -> bool:
    """Whether a process was there at this time already, where Linux tells: its id may be another one's by now."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text().splitlines()
        booted_s = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    except (OSError, ValueError, IndexError, StopIteration):
        return True
    return booted_s + ticks / os.sysconf("SC_CLK_TCK") < unix_s + CLOCK_S


class RunFile(BaseModel):
    """What the launcher says of a run under way, in `RUN_FILE`."""

    redis_url: str | None = None
    run: PartyName = "run"
    method: RunMethod | None = None
    budget_tokens: PositiveInt | None = None
    page: str | None = None
    closing: bool = False
    ended: str = ""
    own: dict[PartyName, Started] = {}
    pids: dict[PartyName, PositiveInt]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """That of an output folder.

        Raises:
            UsageError: it is damaged.
        """
        try:
            return cls.model_validate(read_object(folder / RUN_FILE))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"{part}: " for part in first["loc"] if part != "[key]")
            raise _damaged(folder, f"{where}{told(first)}") from error
        except UsageError as error:
            raise UsageError(error.found, DAMAGED) from error

    @classmethod
    def budget(cls, folder: Path) -> int:
        """Budget in tokens of a run without a Redis, which would know it.

        Raises:
            UsageError: the file is damaged, or does not say it.
        """
        if (found := cls.read(folder).budget_tokens) is None:
            raise _damaged(folder, "budget_tokens: missing")
        return found


def _damaged(folder: Path, what: str) -> UsageError:
    return UsageError(f"{folder / RUN_FILE} is damaged: {what}", DAMAGED)


def is_output(folder: Path) -> bool:
    """Whether this is an output folder of `diloco run`, of a run under way or over."""
    return any((folder / name).is_file() for name in (RUN_FILE, REPORT_FILE))


def is_live(folder: Path) -> bool:
    """Whether `diloco run` is at work in this output folder."""
    if (folder / REPORT_FILE).is_file() or not (folder / RUN_FILE).is_file():
        return False
    launcher = RunFile.read(folder).pids.get("launcher")
    if launcher is None or not is_running(launcher):
        return False
    return began_before(launcher, (folder / RUN_FILE).stat().st_mtime)


def server_url(settings: ServerSettings) -> str:
    """Of the Redis that is named.

    Raises:
        UsageError: none is.
    """
    if (url := settings.bus_url()) is None:
        raise UsageError("which Redis? Give --redis-url redis://HOST:6379, or set DILOCO_REDIS_URL")
    return url


def no_redis(place: Place) -> str:
    """Why a place that `locate` found has no Redis."""
    if place.closing:
        return f"the run in {place} has ended, and its report is being written"
    if place.folder is not None and is_live(place.folder):
        return f"the run in {place} goes on without a Redis: diloco status {place} shows it, Ctrl-C there ends it"
    return f"{place} is over already"


def ended_without_report(folder: Path) -> str:
    """How the run of an output folder has ended, and what to do: it has left no report."""
    ended = RunFile.read(folder).ended
    how = f"was {ended}" if ended else "ended without a report"
    said = f"the run in {folder} {how}; its logs are in {folder / 'logs'}"
    if any((folder / "checkpoints").glob("**/latest")):
        said += f". To go on from its last checkpoint: the same command again, with --out {folder}"
    return said


def locate(settings: BusSettings, folder: Path | None) -> Place:
    """The run that a command is about: the folder, else the Redis URL, else the newest folder in runs/ (of --run).

    Raises:
        UsageError: there is none, or it ended without a report.
    """
    if folder is None:
        if (url := settings.bus_url()) is not None:
            return Place(settings.run, url, None)
        candidates = [file.parent for name in (RUN_FILE, REPORT_FILE) for file in RUNS.glob(f"*/{name}")]
        of_run = ""
        if "run" in settings.model_fields_set:
            candidates = [one for one in candidates if _name_in(one) == settings.run]
            of_run = f" {settings.run!r}"
        if not candidates:
            raise UsageError(
                f"no run{of_run} in ./{RUNS}: name its output folder, or give --redis-url (or DILOCO_REDIS_URL)"
            )
        folder = max(candidates, key=lambda found: found.stat().st_mtime)
    if (folder / REPORT_FILE).is_file():
        return Place(settings.run, None, folder)
    if not (folder / RUN_FILE).is_file():
        raise UsageError(f"{folder} is no output folder of `diloco run`: it has neither {RUN_FILE} nor {REPORT_FILE}")
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
    """The run's name, as its output folder has it; None: it cannot be read, or is gone by now."""
    try:
        file = next(folder / name for name in (RUN_FILE, REPORT_FILE) if (folder / name).is_file())
        return read_object(file).get("run")
    except (StopIteration, UsageError):
        return None
