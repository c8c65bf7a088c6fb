"""Follows a run, and writes its curves until it is finished. It reads only: the run does not notice.

Points are noted in a file once they are on disk. Who goes on later reads the run from its first second, and leaves out
what is noted. A kill between writing and noting makes points again: the same values at the same steps.
"""

import asyncio
import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

import typer

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import BusError, DilocoError, UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.files.replacing import replace
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.process import signals
from diloco.pipeline.view.last_look import Reading
from diloco.pipeline.view.page.collector import MOST_READ, RunReader
from diloco.pipeline.view.page.model import Look
from diloco.tracking.curves import Point, Rounds, evaluations, now
from diloco.tracking.trackers import PACKAGES, TensorBoard, Tracker, Wandb, check_package

EVERY_S = 10.0
LAST_S = 120.0
"""For the evaluation of a finished run's last model, which comes after its end."""


def _mark(kind: str, point: Point) -> list[float]:
    """What grows from point to point: a run may be evaluated again at the same tokens, as at its end."""
    return [point.step, point.unix_s if kind == "evaluations" else 0]


class Notes:
    """What of which run was written there; the folder is this process's own for as long as it lives."""

    def __init__(self, folder: Path, run: str, kind: str) -> None:
        """Read them, if there are some.

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
                raise UsageError(f"--into {folder} has curves of run {name!r}: name another folder for {run!r}")
        except BlockingIOError as error:
            self.close()
            raise UsageError(f"--into {folder}: another watcher writes there; name another folder") from error
        except OSError as error:
            self.close()
            why = f"cannot be locked: {error.strerror or error}"
            raise UsageError(f"--into {folder} {why}; name another folder") from error
        except UsageError:
            self.close()
            raise
        self.run, self.life = run, str(found.get("life") or secrets.token_hex(8))
        self._began_s: float | None = found.get("began_unix_s")
        self._last: dict[str, list[float]] = dict(found.get("last", {}))

    def close(self) -> None:
        """Leave the folder to others."""
        os.close(self._lock)

    def check(self, began_s: float | None) -> None:
        """Take note of when the run first began, in Unix time.

        Raises:
            UsageError: it is another run than that of the notes.
        """
        if began_s is not None:
            if self._began_s is None:
                self._began_s = began_s
                self.save()
            if self._began_s != began_s:
                raise UsageError(
                    f"--into {self._folder} has curves of an earlier run named {self.run!r}: name another folder"
                )

    def put(self, kind: str, points: list[Point], tracker: Tracker) -> None:
        """Write those beyond the last one of their kind."""
        last = self._last.get(kind, [-1, 0])
        new = [one for one in points if _mark(kind, one) > last]
        if not new:
            return
        tracker.put(new)
        self._last[kind] = max(_mark(kind, one) for one in new)
        if tracker.on_disk:
            self.save()

    def save(self) -> None:
        """Note what was put: all of it is on disk."""
        notes = {"run": self.run, "began_unix_s": self._began_s, "life": self.life, "last": self._last}
        replace(self._file, [dumps(notes).encode()])


class Writer:
    """Writes what looks at a run tell."""

    def __init__(self, notes: Notes, tracker: Tracker) -> None:
        self._notes, self._tracker = notes, tracker
        self._rounds, self._reading = Rounds(), Reading()
        self._now: list[Point] = []

    def see(self, look: Look) -> None:
        """Write what is new.

        What is so now is written once there are more tokens: of looks at the same ones the last counts.

        Raises:
            UsageError: as `Notes.check`.
        """
        self._notes.check(look.origin_s)
        self._notes.put("evaluations", evaluations(look), self._tracker)
        self._notes.put("rounds", self._rounds.see(look), self._tracker)
        self._reading.see(look)
        new = now(self._reading, look)
        if new and self._now and new[0].step > self._now[0].step:
            self.end()
        self._now = new or self._now

    def end(self) -> None:
        """Write what is held back."""
        self._notes.put("now", self._now, self._tracker)


async def _follow(url: str, run: str, writer: Writer) -> None:
    stop, said = signals.stop_event(), False
    over_s: float | None = None
    async with open_bus(url, run) as bus:
        reader, clock = RunReader(bus, bus.clock, None), bus.clock
        while not stop.is_set():
            try:
                look = await reader.look()
            except BusError as error:
                typer.echo(f"Redis does not answer ({error}); asking again every {EVERY_S:g} s", err=True)
            else:
                writer.see(look)
                if max(len(look.records), len(look.evaluations)) >= MOST_READ:
                    continue  # there may be more
                if look.status["phase"] != Phase.FINISHED:
                    over_s = None
                    if not (said or look.shares):
                        typer.echo(f"nothing is known of run {run!r} yet: waiting for it to begin")
                        said = True
                elif over_s is None:
                    over_s = clock.now()  # a look more: what was merged before the end may have come after the tape
                elif (last := look.status["evaluation"]) is None or last["final"]:
                    typer.echo(f"run {run!r} is finished, and its curves are whole")
                    return
                elif clock.now() > over_s + LAST_S:
                    typer.echo(f"run {run!r} is finished; no evaluation of its last model came in {LAST_S:g} s")
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S if over_s is None else min(1, EVERY_S)):
                    await stop.wait()


def follow(url: str, run: str, kind: str, folder: Path | None) -> None:
    """Write the curves of a run until it is finished, or a signal.

    Args:
        url: of its Redis.
        run: its name.
        kind: of `PACKAGES`.
        folder: None: one of the kind and the run.

    Raises:
        UsageError: no such kind, its package is missing, or the folder cannot be used.
        PeerError: what is on the Redis is not a run of this build.
    """
    if kind not in PACKAGES:
        raise UsageError(f"--to {kind}: there are {', '.join(PACKAGES)}")
    check_package(kind)
    folder = folder or Path("tracked") / kind / run
    notes = Notes(folder, run, kind)
    try:
        tracker: Tracker = TensorBoard(folder) if kind == "tensorboard" else Wandb(folder, run, notes.life)
        try:
            writer = Writer(notes, tracker)
            typer.echo(f"writing run {run!r} to {folder} until it is finished or Ctrl-C; the run does not notice")
            try:
                asyncio.run(_follow(url, run, writer))
                writer.end()
            finally:
                tracker.close()
                notes.save()
        except OSError as error:
            raise DilocoError(f"--into {folder} cannot be written any more: {error}") from error
    finally:
        notes.close()
