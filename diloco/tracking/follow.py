"""Follow a run and write its curves until it is finished. It only reads from Redis, so the run is not affected.

Once points are stored, the last ones are noted in a file. A later call reads the run from its start, and leaves out all
points up to the noted ones. If the process is killed between storing and noting, points are written twice, with the
same values at the same steps; MLflow keeps one of them.
"""

import asyncio
import fcntl
import os
import secrets
from contextlib import ExitStack, closing
from itertools import groupby
from pathlib import Path

import typer

from diloco.extras import load_extra
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import BusError, DilocoError, UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.files.replacing import replace
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.process import signals
from diloco.pipeline.view.page.collector import MAX_READ, RunReader
from diloco.pipeline.view.page.last_poll import Reading
from diloco.pipeline.view.page.model import Poll
from diloco.pipeline.waiting import first_of
from diloco.tracking.curves import Losses, Point, Rounds, now
from diloco.tracking.trackers import TRACKERS, Tracker

EVERY_S = 10.0
# Time to wait for the evaluation of a finished run's last model, which comes after the end of training.
LAST_S = 120.0
OTHER_FOLDER = "choose a different folder"


def _mark(kind: str, point: Point) -> list[float]:
    """Return a key that grows from point to point.

    A run may be evaluated twice at the same tokens, as at its end. The times of losses differ by milliseconds from poll
    to poll, as reports arrive sooner or later.
    """
    if kind.startswith("loss/"):
        return [round(point.unix_s, 1), 0]
    return [point.step, point.unix_s if kind == "evaluations" else 0]


class Notes:
    """Notes in an output folder: the run, and the points written so far. Locks the folder while the process lives."""

    def __init__(self, folder: Path, run: str, kind: str) -> None:
        """Lock the folder, and read its notes if it has some.

        Raises:
            UsageError: the folder has another run's curves, another watcher is at work on it, or it cannot be used.
        """
        self._folder, self._file = folder, folder / f"diloco-{kind}.json"
        with ExitStack() as undo:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                undo.callback(self.close)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = read_object(self._file) if self._file.exists() else {}
            except BlockingIOError as error:
                raise UsageError(f"--into {folder}: another watcher is writing there", OTHER_FOLDER) from error
            except OSError as error:
                raise UsageError(f"--into {folder} cannot be used as a folder", OTHER_FOLDER, str(error)) from error
            if found and (name := found.get("run")) != run:
                raise UsageError(f"--into {folder} has curves of run {name!r}, not {run!r}", OTHER_FOLDER)
            undo.pop_all()
        self.run, self.life = run, str(found.get("life") or secrets.token_hex(4))
        self._began_s: float | None = found.get("began_unix_s")
        self._written: dict[str, list[float]] = found.get("last", {})
        self._last = dict(self._written)

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    def check(self, began_s: float | None) -> None:
        """Note when the run first began, in Unix time; None: it has not begun.

        Raises:
            UsageError: the notes are about another run, which has the same name and began at another time.
        """
        if began_s is not None and began_s != self._began_s:
            if self._began_s is not None:
                raise UsageError(f"--into {self._folder} has curves of an earlier run named {self.run!r}", OTHER_FOLDER)
            self._began_s = began_s
            self.save()

    def new(self, kind: str, points: list[Point]) -> list[Point]:
        """Return the points beyond the last one of their kind, which is now the last of these."""
        last = self._last.get(kind, [-1, 0])
        new = [one for one in points if _mark(kind, one) > last]
        self._last[kind] = max([last, *(_mark(kind, one) for one in new)])
        return new

    def wrote(self) -> None:
        """Note that all points that `new` has returned are written."""
        self._written = dict(self._last)

    def save(self) -> None:
        """Save the notes. Call this only once the tracker has stored all points that are noted as written."""
        notes = {"run": self.run, "began_unix_s": self._began_s, "life": self.life, "last": self._written}
        replace(self._file, [dumps(notes).encode()])


class Writer:
    """Writes the points of successive polls at a run."""

    def __init__(self, notes: Notes, tracker: Tracker) -> None:
        self._notes, self._tracker = notes, tracker
        self._rounds, self._losses, self._reading = Rounds(), Losses(), Reading()
        self._now: list[Point] = []

    def see(self, poll: Poll) -> None:
        """Write the points that are new at a poll.

        The current values are held back until a poll has more trained tokens: of several polls at the same number of
        tokens only the last one is written.

        Raises:
            UsageError: the run is a different one from before (`Notes.check`).
        """
        self._notes.check(poll.origin_s)
        held_out = [Point("global/loss", one.tokens, one.loss, one.unix_s) for one in poll.evaluations]
        points = self._notes.new("evaluations", held_out) + self._notes.new("rounds", self._rounds.see(poll))
        for tag, losses in groupby(self._losses.see(poll), key=lambda one: one.tag):
            points += self._notes.new(tag, list(losses))
        self._reading.see(poll)
        current = now(self._reading, poll)
        if current and self._now and current[0].step > self._now[0].step:
            points += self._notes.new("now", self._now)
        self._now = current or self._now
        self._put(points)

    def end(self) -> None:
        """Write the current values that are held back."""
        self._put(self._notes.new("now", self._now))

    def _put(self, points: list[Point]) -> None:
        if points:
            self._tracker.put(points)
            self._notes.wrote()
            if self._tracker.stored:
                self._notes.save()


async def _follow(url: str, run: str, writer: Writer) -> None:
    stop, said = signals.stop_event(), False
    over_s: float | None = None
    async with open_bus(url, run) as bus:
        reader, clock = RunReader(bus, bus.clock, None), bus.clock
        while not stop.is_set():
            try:
                poll = await reader.poll()
            except BusError as error:
                typer.echo(f"Redis is not answering ({error}); retrying every {EVERY_S:g} s", err=True)
            else:
                writer.see(poll)
                if max(len(poll.records), len(poll.evaluations)) >= MAX_READ:
                    continue  # a full read may not be the last one
                if poll.status["phase"] != Phase.FINISHED:
                    over_s = None
                    if not (said or poll.shares):
                        typer.echo(f"nothing is known about run {run!r} yet: waiting for it to start")
                        said = True
                elif over_s is None:
                    over_s = clock.now()  # poll again: this one read the tape first, so the last merges may be missing
                elif (last := poll.status["evaluation"]) is None or last["final"]:
                    typer.echo(f"run {run!r} is finished, and its curves are complete")
                    return
                elif clock.now() > over_s + LAST_S:
                    typer.echo(f"run {run!r} is finished; its last model was not evaluated within {LAST_S:g} s")
                    return
            await first_of(stop, timeout_s=EVERY_S if over_s is None else min(1, EVERY_S))


def follow(url: str, run: str, kind: str, folder: Path | None) -> None:
    """Write the curves of a run to a tracker (a key of `TRACKERS`) until the run is finished, or a signal.

    The folder is tracked/KIND/RUN by default.

    Raises:
        UsageError: there is no such kind, its package is missing, it refuses, or the folder cannot be used.
        PeerError: the run on this Redis was made by another build.
        DilocoError: the folder or the tracker cannot be written any more.
    """
    if kind not in TRACKERS:
        raise UsageError(f"--to {kind}: use one of {', '.join(TRACKERS)}")
    load_extra(kind, f"watch --to {kind}")  # before a folder is made
    folder = folder or Path("tracked") / kind / run
    with closing(Notes(folder, run, kind)) as notes:
        try:
            notes.save()  # a later call continues this run of the tracker, even if this process is killed now
            tracker = TRACKERS[kind](folder, run, notes.life)
            try:
                writer = Writer(notes, tracker)
                typer.echo(f"writing run {run!r} to {kind} ({folder}) until its end or Ctrl-C; this does not affect it")
                asyncio.run(_follow(url, run, writer))
                writer.end()
            finally:
                tracker.close()
                if not tracker.stored:
                    notes.save()
        except OSError as error:
            raise DilocoError(f"--into {folder} can no longer be written: {error}") from error
