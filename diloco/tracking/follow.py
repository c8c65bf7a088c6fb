"""Follow a run and write its curves until it is finished. It only reads from Redis, so the run is not affected.

Once points are on disk, the last ones are noted in a file. A later call reads the run from its start, and leaves out
all points up to the noted ones. If the process is killed between writing and noting, points are written twice, with the
same values at the same steps.
"""

import asyncio
import fcntl
import os
import secrets
from collections import defaultdict
from collections.abc import Sequence
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
from diloco.tracking.curves import ROUND, Losses, Point, Rounds, evaluations, now

EVERY_S = 10.0
# Time to wait for the evaluation of a finished run's last model, which comes after the end of training.
LAST_S = 120.0
# Kinds of trackers -> the module that each needs.
PACKAGES = {"tensorboard": "tensorboard.summary.writer.event_file_writer", "wandb": "wandb"}


class TensorBoard:
    """Writes event files to a folder, a new file for each process that writes."""

    on_disk = True  # when `put` returns; otherwise points are on disk when `close` returns

    def __init__(self, folder: Path) -> None:
        """Begin a new event file in the folder."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def put(self, points: Sequence[Point]) -> None:
        """Write the points and flush them to disk."""
        for point in points:
            value = self._summary.Value(tag=point.tag, simple_value=point.value)
            summary = self._summary(value=[value])
            self._writer.add_event(self._event(wall_time=point.unix_s, step=point.step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """Writes to a run of Weights & Biases; WANDB_MODE, WANDB_PROJECT and the like configure it."""

    on_disk = False  # its own process writes 32 KiB at a time, and loses the rest if this one is killed

    def __init__(self, folder: Path, run: str, life: str) -> None:
        """Begin the run, or continue it.

        Args:
            folder: folder for its files.
            run: name that Weights & Biases shows.
            life: id of the run there; a later call with the same id continues the run.

        Raises:
            UsageError: Weights & Biases refuses.
        """
        import wandb

        try:
            self._run = wandb.init(id=life, name=run, dir=str(folder), resume="allow")
        except wandb.errors.Error as error:
            raise UsageError(
                f"Weights & Biases: {error} (without an account or a connection, set WANDB_MODE=offline)"
            ) from error
        self._run.define_metric("*", step_metric="tokens")
        self._run.define_metric(f"{ROUND}*", step_metric="round")

    def put(self, points: Sequence[Point]) -> None:
        """Add the points; all that share a step are one row."""
        rows: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        for point in points:
            axis = "round" if point.tag.startswith(ROUND) else "tokens"
            rows[axis, point.step][point.tag] = point.value
        for (axis, step), values in sorted(rows.items()):
            self._run.log({**values, axis: step})

    def close(self) -> None:
        """Finish the run, which waits until all points are written."""
        self._run.finish()


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
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise UsageError(f"--into {folder} cannot be used as a folder: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = read_object(self._file) if self._file.exists() else {}
            if found and found.get("run") != run:
                name = found.get("run")
                raise UsageError(f"--into {folder} has curves of run {name!r}: choose a different folder for {run!r}")
        except BlockingIOError as error:
            self.close()
            raise UsageError(f"--into {folder}: another watcher is writing there; choose a different folder") from error
        except OSError as error:
            self.close()
            why = f"cannot be locked: {error.strerror or error}"
            raise UsageError(f"--into {folder} {why}; choose a different folder") from error
        except UsageError:
            self.close()
            raise
        self.run, self.life = run, str(found.get("life") or secrets.token_hex(8))
        self._began_s: float | None = found.get("began_unix_s")
        self._last: dict[str, list[float]] = dict(found.get("last", {}))

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    def check(self, began_s: float | None) -> None:
        """Note when the run first began, in Unix time; None: it has not begun.

        Raises:
            UsageError: the notes are about another run, which has the same name and began at another time.
        """
        if began_s is not None:
            if self._began_s is None:
                self._began_s = began_s
                self.save()
            if self._began_s != began_s:
                raise UsageError(
                    f"--into {self._folder} has curves of an earlier run named {self.run!r}: choose a different folder"
                )

    def put(self, kind: str, points: list[Point], tracker: TensorBoard | Wandb) -> None:
        """Write the points beyond the last one of their kind."""
        last = self._last.get(kind, [-1, 0])
        new = [one for one in points if _mark(kind, one) > last]
        if not new:
            return
        tracker.put(new)
        self._last[kind] = max(_mark(kind, one) for one in new)
        if tracker.on_disk:
            self.save()

    def save(self) -> None:
        """Save the notes; all points that were put must be on disk."""
        notes = {"run": self.run, "began_unix_s": self._began_s, "life": self.life, "last": self._last}
        replace(self._file, [dumps(notes).encode()])


class Writer:
    """Writes the points of successive polls at a run."""

    def __init__(self, notes: Notes, tracker: TensorBoard | Wandb) -> None:
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
        self._notes.put("evaluations", evaluations(poll), self._tracker)
        self._notes.put("rounds", self._rounds.see(poll), self._tracker)
        for tag, points in groupby(self._losses.see(poll), key=lambda one: one.tag):
            self._notes.put(tag, list(points), self._tracker)
        self._reading.see(poll)
        new = now(self._reading, poll)
        if new and self._now and new[0].step > self._now[0].step:
            self.end()
        self._now = new or self._now

    def end(self) -> None:
        """Write the current values that are held back."""
        self._notes.put("now", self._now, self._tracker)


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
                    over_s = (
                        clock.now()
                    )  # poll once more: this poll read the tape before the state, so the last merges may be missing
                elif (last := poll.status["evaluation"]) is None or last["final"]:
                    typer.echo(f"run {run!r} is finished, and its curves are complete")
                    return
                elif clock.now() > over_s + LAST_S:
                    typer.echo(f"run {run!r} is finished; its last model was not evaluated within {LAST_S:g} s")
                    return
            await first_of(stop, timeout_s=EVERY_S if over_s is None else min(1, EVERY_S))


def follow(url: str, run: str, kind: str, folder: Path | None) -> None:
    """Write the curves of a run until it is finished, or a signal.

    Args:
        url: URL of the run's Redis.
        run: name of the run.
        kind: tracker to write to, a key of `PACKAGES`.
        folder: where to write; None: tracked/KIND/RUN.

    Raises:
        UsageError: there is no such kind, its package is missing, or the folder cannot be used.
        PeerError: the run on this Redis was made by another build.
        DilocoError: the folder cannot be written any more.
    """
    if kind not in PACKAGES:
        raise UsageError(f"--to {kind}: use one of {', '.join(PACKAGES)}")
    load_extra(PACKAGES[kind], f"watch --to {kind}")  # before a folder is made
    folder = folder or Path("tracked") / kind / run
    notes = Notes(folder, run, kind)
    try:
        tracker: TensorBoard | Wandb = TensorBoard(folder) if kind == "tensorboard" else Wandb(folder, run, notes.life)
        try:
            writer = Writer(notes, tracker)
            typer.echo(f"writing run {run!r} to {folder} until it is finished or Ctrl-C; this does not affect the run")
            try:
                asyncio.run(_follow(url, run, writer))
                writer.end()
            finally:
                tracker.close()
                notes.save()
        except OSError as error:
            raise DilocoError(f"--into {folder} can no longer be written: {error}") from error
    finally:
        notes.close()
