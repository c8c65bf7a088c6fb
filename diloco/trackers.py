"""What `diloco watch --to` writes to: TensorBoard's files, or Weights & Biases. Imported only then."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from diloco.pipeline.errors import UsageError, missing


class Point(NamedTuple):
    """A value of a curve."""

    tag: str
    step: int
    value: float
    unix_s: float


class Tracker(Protocol):
    """Where curves are kept."""

    def put(self, points: Sequence[Point]) -> None:
        """Add points; on return they outlive this process."""
        ...

    def close(self) -> None:
        """End in order."""
        ...


class TensorBoard:
    """Event files in a folder, one more for each life of the writer."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise UsageError(missing("tensorboard", "tensorboard", "`diloco watch --to tensorboard`")) from error
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
    """A run of Weights & Biases, gone on with by its id; WANDB_MODE, WANDB_PROJECT and the like say where."""

    def __init__(self, folder: Path, run: str, life: str) -> None:
        """Args:
        folder: for its files.
        run: name of the run.
        life: its id there: the same again goes on with it.
        """
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise UsageError(missing("wandb", "wandb", "`diloco watch --to wandb`")) from error
        try:
            self._run = wandb.init(id=life, name=run, dir=str(folder), resume="allow")
        except wandb.errors.Error as error:
            raise UsageError(f"Weights & Biases: {error}") from error
        self._run.define_metric("*", step_metric="tokens")

    def put(self, points: Sequence[Point]) -> None:
        """As `Tracker`."""
        by_step: dict[int, dict[str, float]] = {}
        for point in points:
            by_step.setdefault(point.step, {})[point.tag] = point.value
        for step, values in sorted(by_step.items()):
            self._run.log({**values, "tokens": step})

    def close(self) -> None:
        """As `Tracker`."""
        self._run.finish()
