"""Runs of the failure simulator over all cores, with progress on stderr."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diloco_studies.goodput.commands.options import Sample
from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.fleet import Run, simulate
from diloco_studies.goodput.table import Cell, row

# How often a line says how far the runs are, s, where stderr is not a terminal and shows no bar.
TOLD_EVERY_S = 30.0


class Task(NamedTuple):
    """One seed of one cell."""

    constants: Constants
    cell: Cell
    days: float
    seed: int


def one(task: Task) -> Run:
    """A run; its time lines are left behind."""
    cell = task.cell
    run = simulate(task.constants, cell.method, cell.chips, cell.learners, task.days, task.seed)
    return replace(run, learners=())


def rows(cells: Sequence[tuple[Constants, Cell]], sample: Sample) -> list[dict[str, Any]]:
    """One row a cell, in order.

    Raises:
        UsageError: the constants describe no world that can be simulated.
    """
    seeds = sample.seeds
    tasks = [Task(constants, cell, sample.days, seed) for constants, cell in cells for seed in range(seeds)]
    runs = _all(tasks, sample.processes)
    return [row(cell, runs[i * seeds : (i + 1) * seeds]) for i, (_, cell) in enumerate(cells)]


def _all(tasks: Sequence[Task], jobs: int) -> list[Run]:
    found: dict[int, Run] = {}
    console, told_s = Console(stderr=True), time.monotonic()
    columns = TextColumn("simulating, largest first"), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, *times, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(tasks))
        for i, run in _outcomes(tasks, jobs):
            found[i] = run
            progress.advance(bar)
            if not console.is_terminal and time.monotonic() > told_s + TOLD_EVERY_S:
                console.print(f"simulated {len(found)} of {len(tasks)} runs, largest first", highlight=False)
                told_s = time.monotonic()
    return [found[i] for i in range(len(tasks))]


def _outcomes(tasks: Sequence[Task], jobs: int) -> Iterable[tuple[int, Run]]:
    # The largest first: the last one to end should be a small one.
    ordered = sorted(enumerate(tasks), key=lambda item: -item[1].cell.learners * item[1].cell.chips)
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
