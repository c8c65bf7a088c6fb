"""`diloco watch --to`: writes a run's curves elsewhere, beside it. Learners carry no tracker, and notice none.

Every step is a number of the run's trained tokens. What was written is noted in a file before it is written: a watcher
that is killed may leave out its last look, and the next one writes nothing twice.
"""

import asyncio
import json
import secrets
from contextlib import suppress
from pathlib import Path

import typer

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusError, UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.files.replacing import replace
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.tape import Committed
from diloco.pipeline.process import lifecycle
from diloco.pipeline.view.page.collector import RunReader
from diloco.pipeline.view.page.model import Look
from diloco.pipeline.view.status import present
from diloco.trackers import Point, TensorBoard, Tracker, Wandb

EVERY_S = 10.0
NOTES = "diloco-watch.json"
"""The run, the id of its curves, and the last step of each kind of point that was written."""
KINDS = ("tensorboard", "wandb")


def evaluations(look: Look) -> list[Point]:
    """Held-out loss of the global parameters, one point an evaluation."""
    return [Point("global/loss", one.tokens, one.loss, one.unix_s) for one in look.evaluations]


def now(look: Look) -> list[Point]:
    """What is so now: shares, fates, rates, and each live learner."""
    status, at = look.status, (look.status["tokens"], look.now_s)
    learners = [one for one in present(status["learners"]) if one["live"]]
    share = status["merged_share"]
    values: dict[str, float | None] = {
        "run/merged_share": share["since_start"],
        "run/merged_share_recent": share["recent"],
        "run/tokens_per_s": sum(one["tokens_per_s"] for one in learners),
        "run/learners": len(learners),
        "run/outer_steps": status["outer_steps"],
        "tokens/merged": status["merged_tokens"],
        "tokens/overwritten": status["tokens_lost"]["overwritten"],
        "tokens/rejected": status["tokens_lost"]["rejected"],
        "tokens/died": status["tokens_lost"]["died"],
        "tokens/pending": status["tokens_lost"]["pending"],
    }
    for one in learners:
        values[f"loss/{one['id']}"] = one["loss"]
        values[f"steps_per_s/{one['id']}"] = 1 / one["step_s"] if one["step_s"] else None
    lately = [one for one in look.records if one.unix_s > look.now_s - 2 * EVERY_S]  # the first look has all there is
    merges = [one for one in lately if isinstance(one, Committed) and one.contributions]
    if merges:
        values["merges/norm"] = sum(one.norm for one in merges) / len(merges)
        values["merges/learners"] = sum(len(one.contributions) for one in merges) / len(merges)
        values["merges/merge_s"] = sum(one.merge_s for one in merges) / len(merges)
    return [Point(tag, at[0], value, at[1]) for tag, value in values.items() if value is not None]


class Notes:
    """What was written already, of which run."""

    def __init__(self, folder: Path, run: str) -> None:
        """Raises:
        UsageError: the folder has another run's curves, or cannot be written.
        """
        self._file = folder / NOTES
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = read_object(self._file) if self._file.exists() else {}
        except OSError as error:
            raise UsageError(f"--into {folder}: {error.strerror or error}") from error
        if found and found.get("run") != run:
            raise UsageError(f"--into {folder} has curves of run {found.get('run')!r}: name another folder for {run!r}")
        self.run, self.life = run, str(found.get("life") or secrets.token_hex(8))
        self._last: dict[str, int] = dict(found.get("last", {}))

    def new(self, kind: str, points: list[Point]) -> list[Point]:
        """Those beyond the last one of their kind; noted as written."""
        last = self._last.get(kind, -1)
        found = [one for one in points if one.step > last]
        if found:
            self._last[kind] = max(one.step for one in found)
            text = json.dumps({"run": self.run, "life": self.life, "last": self._last})
            replace(self._file, [text.encode()])
        return found


def write(look: Look, notes: Notes, tracker: Tracker) -> None:
    """Write what is new of a look."""
    points = notes.new("evaluations", evaluations(look)) + notes.new("now", now(look))
    if points:
        tracker.put(points)


async def _follow(url: str, notes: Notes, tracker: Tracker) -> None:
    stop = lifecycle.stop_event()
    async with open_bus(url, notes.run) as bus:
        reader = RunReader(bus, LoopClock(), None)
        while not stop.is_set():
            try:
                look = await reader.look()
            except BusError as error:
                typer.echo(f"Redis does not answer ({error}); asking again every {EVERY_S:g} s", err=True)
            else:
                write(look, notes, tracker)
                if look.status["phase"] == Phase.FINISHED:
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await stop.wait()


def track(url: str, run: str, kind: str, folder: Path | None) -> None:
    """Write the curves of a run until it is finished, or a signal.

    Args:
        url, run: the run's.
        kind: of `KINDS`.
        folder: None: one of the run's name.

    Raises:
        UsageError: no such kind, its package is missing, or the folder cannot be used.
    """
    if kind not in KINDS:
        raise UsageError(f"--to {kind}: there are {', '.join(KINDS)}")
    folder = folder or Path("tracked") / run
    notes = Notes(folder, run)
    tracker: Tracker = TensorBoard(folder) if kind == "tensorboard" else Wandb(folder, run, notes.life)
    try:
        typer.echo(f"writing run {run!r} to {folder} until it is finished or Ctrl-C; the run does not notice")
        asyncio.run(_follow(url, notes, tracker))
    finally:
        tracker.close()
