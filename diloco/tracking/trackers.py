"""What `diloco watch --to` writes to: TensorBoard's files, or Weights & Biases. Each is imported when it is wanted."""

import importlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from diloco.pipeline.errors import UsageError, missing
from diloco.tracking.curves import ROUND, Point

PACKAGES = {"tensorboard": "tensorboard.summary.writer.event_file_writer", "wandb": "wandb"}
"""What each kind needs."""


def check_package(kind: str) -> None:
    """Before anything is made for it.

    Raises:
        UsageError: what the kind needs is not installed.
    """
    try:
        importlib.import_module(PACKAGES[kind])
    except ModuleNotFoundError as error:
        raise UsageError(missing(kind, kind, f"`diloco watch --to {kind}`")) from error


class Tracker(Protocol):
    """Where curves are kept."""

    on_disk: bool
    """Points are on disk once they are put; else once it is closed."""

    def put(self, points: Sequence[Point]) -> None:
        """Add points."""
        ...

    def close(self) -> None:
        """End in order: all points are on disk."""
        ...


class TensorBoard:
    """Event files in a folder, one more for each life of the writer."""

    on_disk = True

    def __init__(self, folder: Path) -> None:
        """Begin one."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def put(self, points: Sequence[Point]) -> None:
        """As `Tracker`."""
        for point in points:
            value = self._summary.Value(tag=point.tag, simple_value=point.value)
            summary = self._summary(value=[value])
            self._writer.add_event(self._event(wall_time=point.unix_s, step=point.step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """As `Tracker`."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; WANDB_MODE, WANDB_PROJECT and the like say where."""

    on_disk = False  # its own process writes 32 KiB at a time, and loses the rest if this one is killed

    def __init__(self, folder: Path, run: str, life: str) -> None:
        """Begin it, or go on with it.

        Args:
            folder: for its files.
            run: its name there.
            life: its id there.

        Raises:
            UsageError: it refuses.
        """
        import wandb

        try:
            self._run = wandb.init(id=life, name=run, dir=str(folder), resume="allow")
        except wandb.errors.Error as error:
            raise UsageError(f"Weights & Biases: {error} (without an account or a line: WANDB_MODE=offline)") from error
        self._run.define_metric("*", step_metric="tokens")
        self._run.define_metric(f"{ROUND}*", step_metric="round")

    def put(self, points: Sequence[Point]) -> None:
        """As `Tracker`."""
        rows: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        for point in points:
            axis = "round" if point.tag.startswith(ROUND) else "tokens"
            rows[axis, point.step][point.tag] = point.value
        for (axis, step), values in sorted(rows.items()):
            self._run.log({**values, axis: step})

    def close(self) -> None:
        """As `Tracker`."""
        self._run.finish()
