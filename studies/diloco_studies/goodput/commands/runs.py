"""Runs of the failure simulator over all cores, with a progress bar and a cache."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import diloco
import diloco_studies
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco_studies.goodput.commands.options import Sample
from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.fleet import Run, simulate
from diloco_studies.goodput.table import Cell, row
from diloco_studies.goodput.traces import read_trace

SOURCES = {
    Path(diloco.__file__).parent: ("*.py", "syncer/**/*.py", "pipeline/**/*.py", "workers/*.py"),
    Path(diloco_studies.__file__).parent: ("*.py", "goodput/*.py"),
}
"""What a cached result depends on, beside its arguments: files of two packages."""


class Task(NamedTuple):
    """One seed of one cell."""

    constants: Constants
    cell: Cell
    days: float
    seed: int


def cache_folder() -> Path:
    """Where results are kept; deleting it costs time and nothing else."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco" / "simulate"


def sources() -> list[Path]:
    """The files of `SOURCES`."""
    return sorted(path for package, patterns in SOURCES.items() for one in patterns for path in package.glob(one))


def code_digest() -> str:
    """Of the program's own files: other code, other results."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def digest_of(task: Task, code: str) -> str:
    """Of everything that a result depends on, the contents of trace files included."""
    given = ((task.constants.repair_trace, 1), (task.constants.link_trace, 3))
    traces = [read_trace(path, columns).tobytes() for path, columns in given if path]
    said = [task.constants.model_dump_json(), *map(str, task.cell), task.days, task.seed, code]
    return hashlib.sha256(dumps(said).encode() + b"".join(traces)).hexdigest()[:32]


def one(task: Task) -> dict[str, Any]:
    """A run as plain data; its time lines are left behind."""
    cell = task.cell
    run = simulate(task.constants, cell.method, cell.chips, cell.learners, task.days, task.seed)
    return {**asdict(Run(run.goodput, run.lost, run.uptime, run.longest_stall_s, (), run.windows))}


def rows(cells: Sequence[tuple[Constants, Cell]], sample: Sample, console: Console) -> list[dict[str, Any]]:
    """One row a cell, in order.

    Raises:
        UsageError: the constants describe no world that can be simulated, or results cannot be kept where they should.
    """
    seeds = sample.seeds
    tasks = [Task(constants, cell, sample.days, seed) for constants, cell in cells for seed in range(seeds)]
    runs = [Run(**data) for data in _all(tasks, sample.processes, sample.cache, console)]
    return [row(cell, runs[i * seeds : (i + 1) * seeds]) for i, (_, cell) in enumerate(cells)]


def _all(tasks: Sequence[Task], jobs: int, cache: bool, console: Console) -> list[dict[str, Any]]:
    code, folder = code_digest(), cache_folder()
    paths = [folder / f"{digest_of(task, code)}.json" for task in tasks]
    found: dict[int, dict[str, Any]] = {}
    for i, path in enumerate(paths):
        if cache and (kept := _read(path)) is not None:
            found[i] = kept
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("simulating", total=len(tasks), completed=len(found))
        for i, data in _outcomes([(i, task) for i, task in enumerate(tasks) if i not in found], jobs):
            found[i] = data
            if cache:
                _write(paths[i], data)
            progress.advance(bar)
    return [found[i] for i in range(len(tasks))]


def _outcomes(tasks: Sequence[tuple[int, Task]], jobs: int) -> Iterable[tuple[int, dict[str, Any]]]:
    # The largest first: the last one to end should be a small one.
    ordered = sorted(tasks, key=lambda item: -item[1].cell.learners * item[1].cell.chips)
    if jobs == 1 or len(ordered) < 2:
        yield from ((i, one(task)) for i, task in ordered)
        return
    with ProcessPoolExecutor(min(jobs, len(ordered)), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(one, task): i for i, task in ordered}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _read(path: Path) -> dict[str, Any] | None:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or cut short
        return None
    return kept if isinstance(kept, dict) and kept.keys() == {field.name for field in fields(Run)} else None


def _write(path: Path, data: dict[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(dumps(data))
        part.replace(path)
    except OSError as error:
        raise UsageError(
            f"results cannot be kept in {path.parent}: {error}. Say --no-cache, or set XDG_CACHE_HOME to a folder that "
            "can be written"
        ) from error
