"""The trackers of `diloco watch --to`: TensorBoard's files, or Weights & Biases. Each package is imported on use."""

import importlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from diloco.pipeline.errors import UsageError, missing
from diloco.tracking.curves import ROUND, Point

# Kinds of trackers -> the module that each needs.
PACKAGES = {"tensorboard": "tensorboard.summary.writer.event_file_writer", "wandb": "wandb"}


def check_package(kind: str) -> None:
    """Check that the package of a kind is installed, before a folder is made for it.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        importlib.import_module(PACKAGES[kind])
    except ModuleNotFoundError as error:
        raise UsageError(missing(kind, kind, f"`diloco watch --to {kind}`")) from error


class Tracker(Protocol):
    """A place that keeps curves."""

    on_disk: bool
    """True if points are on disk when `put` returns; otherwise they are when `close` returns."""

    def put(self, points: Sequence[Point]) -> None:
        """Add points."""
        ...

    def close(self) -> None:
        """Close the tracker, so that all points are on disk."""
        ...


class TensorBoard:
    """Writes event files to a folder, a new file for each process that writes."""

    on_disk = True

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
