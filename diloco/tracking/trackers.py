"""Write points to TensorBoard, Weights & Biases, trackio or MLflow, with the same names of curves.

Each library is imported when its tracker begins. Its own environment variables say where it writes, and hold secrets.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Protocol

from diloco.pipeline.errors import DilocoError, UsageError
from diloco.tracking.curves import ROUND, Point


class Tracker(Protocol):
    """Writes the curves of one run. Points survive a kill once `put` returns if `stored`, or else once `close` does."""

    stored: bool

    def __init__(self, folder: Path, run: str, life: str) -> None:
        """Begin a run of the tracker that is named after this one, or continue the one with the id `life`."""

    def put(self, points: Sequence[Point]) -> None:
        """Write the points."""

    def close(self) -> None:
        """Write what is held back, and end."""


def _rows(points: Sequence[Point]) -> list[tuple[str, int, dict[str, float]]]:
    """Return (axis, step, values by tag): all points that share a step of an axis are one row."""
    rows: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for point in points:
        rows["round" if point.tag.startswith(ROUND) else "tokens", point.step][point.tag] = point.value
    return [(axis, step, values) for (axis, step), values in sorted(rows.items())]


class TensorBoard:
    """Writes event files to the folder, a new file for each process that writes."""

    stored = True

    def __init__(self, folder: Path, run: str, life: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._writer = Event, EventFileWriter(str(folder))

    def put(self, points: Sequence[Point]) -> None:
        for point in points:
            summary = {"value": [{"tag": point.tag, "simple_value": point.value}]}
            self._writer.add_event(self._event(wall_time=point.unix_s, step=point.step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Writes to a run of Weights & Biases."""

    stored = False  # its own process writes 32 KiB at a time, and loses the rest if this one is killed

    def __init__(self, folder: Path, run: str, life: str) -> None:
        import wandb

        try:
            self._run = wandb.init(id=life, name=run, dir=str(folder), resume="allow")
        except wandb.errors.Error as error:
            hint = "(without an account or a connection, set WANDB_MODE=offline)"
            raise UsageError(f"Weights & Biases: {error} {hint}") from error
        self._run.define_metric("*", step_metric="tokens")
        self._run.define_metric(f"{ROUND}*", step_metric="round")

    def put(self, points: Sequence[Point]) -> None:
        for axis, step, values in _rows(points):
            self._run.log({**values, axis: step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Writes to a run of trackio. It continues runs by their name, so the id is part of the name."""

    stored = True

    def __init__(self, folder: Path, run: str, life: str) -> None:
        import trackio

        unasked = {"auto_log_gpu": False, "auto_log_cpu": False}  # measurements of this machine
        project = os.environ.get("TRACKIO_PROJECT", "diloco")
        self._begin = partial(trackio.init, project, name=f"{run}-{life}", resume="allow", **unasked)
        try:
            self._begin().finish()
        except (ValueError, OSError) as error:  # OSError: not logged in to Hugging Face
            raise UsageError(f"trackio: {error}") from error

    def put(self, points: Sequence[Point]) -> None:
        with redirect_stdout(StringIO()):  # it announces each beginning and end
            run = self._begin()
            for _, step, values in _rows(points):
                run.log(values, step=step)
            run.finish()  # the only public call that waits until the points are stored

    def close(self) -> None:
        pass


class MLflow:
    """Writes to a run of MLflow, found again by a tag. MLflow keeps one of several equal points."""

    stored = True

    def __init__(self, folder: Path, run: str, life: str) -> None:
        import mlflow

        self._mlflow = mlflow
        try:
            found = mlflow.search_runs(filter_string=f"tags.`diloco.watch` = '{life}'", output_format="list")
            ids = [one.info.run_id for one in found]
            self._id = mlflow.start_run(*ids[:1], run_name=run, tags={"diloco.watch": life}).info.run_id
        except (mlflow.MlflowException, ImportError) as error:  # ImportError: a database without sqlalchemy
            raise UsageError(f"MLflow: {error}") from error

    def put(self, points: Sequence[Point]) -> None:
        metrics = [self._mlflow.entities.Metric(p.tag, p.value, int(p.unix_s * 1000), p.step) for p in points]
        try:
            for n in range(0, len(metrics), 1000):  # it refuses more at a time
                self._mlflow.MlflowClient().log_batch(self._id, metrics[n : n + 1000], synchronous=True)
        except self._mlflow.MlflowException as error:
            raise DilocoError("MLflow does not take the points", "repeat the command later", str(error)) from error

    def close(self) -> None:
        self._mlflow.end_run()


# By the package that each needs, which is also its extra.
TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
}
