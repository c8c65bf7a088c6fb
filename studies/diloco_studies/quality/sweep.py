"""Many runs over several processes; each result is kept as soon as it is there. Ctrl-C keeps what is done."""

import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

from diloco.pipeline.errors import DilocoError
from diloco.pipeline.process.cores import one_blas_thread
from diloco.pipeline.process.signals import die_with_parent, end_signals, ignore_hangup, two_phases
from diloco_studies.quality.results.store import Result, Store, look_again
from diloco_studies.quality.settings import LabRun

LOOK_S = 0.2
STOP_S = 10.0
"""In which a run that is asked to stop does so: one that makes no step meanwhile is killed."""


class LabProcessDied(DilocoError):
    """Not by an error of its own."""


class News(NamedTuple):
    """What is known of a run under way."""

    run: int
    """Index in the list of runs."""
    share: float
    """Of its budget; 0: it begins."""
    last: float
    """Last measure; not a number before the first."""


def sweep(
    runs: Sequence[LabRun],
    folder: Path,
    *,
    jobs: int,
    threads: int,
    device: str,
    heard: Callable[[News], None] = lambda news: None,
) -> Iterator[tuple[int, Result | DilocoError]]:
    """Do these runs; yields (index, result or why there is none) as they end, and keeps the results in `folder`.

    Where the system kills a process, the runs under way have no result, and the others go on. On Ctrl-C runs under way
    are given up within a step, or killed after `STOP_S`, and the iterator ends. At a second one they are killed at
    once, and it is a KeyboardInterrupt.

    Raises:
        LabProcessDied: the system killed one while no run was under way.
    """
    # Read when torch loads in the processes below: as many threads as a job has, and idle ones do not spin.
    os.environ.update(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive")
    left = dict(enumerate(runs))
    with _interrupted() as asked:
        while left and not asked.is_set():
            for number, result in _in_one_pool(left, folder, jobs, threads, device, heard, asked):
                del left[number]
                yield number, result


def _in_one_pool(
    runs: Mapping[int, LabRun],
    folder: Path,
    jobs: int,
    threads: int,
    device: str,
    heard: Callable[[News], None],
    asked: threading.Event,
) -> Iterator[tuple[int, Result | DilocoError]]:
    """As `sweep`, until one of the processes is killed. asked: set by the signal to end."""
    context = multiprocessing.get_context("spawn")
    stop, news, begun = context.Event(), context.Queue(), set[int]()
    told = os.getpid(), stop, news, threads
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=told) as pool:
        doing: dict[Future[Result | DilocoError | None], int] = {
            pool.submit(_train, number, run, folder, device): number for number, run in runs.items()
        }
        until = math.inf
        while doing:
            done, _ = wait(doing, timeout=LOOK_S, return_when=FIRST_COMPLETED)
            for one in _drain(news):
                begun.add(one.run)
                heard(one)
            broken = False
            for future in done:
                try:
                    result = future.result()
                except BrokenProcessPool:
                    broken = True
                    continue
                number = doing.pop(future)
                if result is not None:
                    yield number, result
            if broken:
                _kill()
                if asked.is_set():  # the signal to end went to all, and to one that did not ignore it yet
                    return
                why = "a process was killed, perhaps because memory ran out: repeat the command with fewer --jobs"
                lost = sorted(begun.intersection(doing.values()))
                if not lost:
                    raise LabProcessDied(why)
                yield from ((number, LabProcessDied(f"in progress when {why}")) for number in lost)
                return
            if asked.is_set():
                stop.set()
                if time.monotonic() > (until := min(until, time.monotonic() + STOP_S)):
                    _kill()
                    return


def _kill() -> None:
    """All processes of the pool: a request to end they ignore."""
    for process in multiprocessing.active_children():
        process.kill()


def _drain(news: Any) -> list[News]:
    found = []
    while True:
        try:
            found.append(news.get_nowait())
        except queue.Empty:
            return found


@contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """An event that the first signal to end sets, while a second one interrupts."""

    def interrupt() -> None:
        _kill()
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in end_signals()}
    ignore_hangup()  # for Python's tracker of what processes share, which starts here
    resource_tracker.ensure_running()
    asked = threading.Event()
    handle = two_phases(asked.set, interrupt)
    for number in before:
        signal.signal(number, lambda number, frame: handle(number))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- in a process of its own -----------------------------------------------------------------------------

_stop: Any = None
_news: Any = None


def _begin(parent: int, stop: Any, news: Any, threads: int) -> None:
    global _stop, _news  # what a process of the pool has in common over its runs
    die_with_parent(parent)
    for number in end_signals():  # which go to the parent too, and it ends the runs
        signal.signal(number, signal.SIG_IGN)
    import torch

    torch.set_num_threads(threads)
    one_blas_thread()
    _stop, _news = stop, news


def _train(number: int, run: LabRun, folder: Path, device: str) -> Result | DilocoError | None:
    """One run; None: asked to stop."""
    from diloco_studies.quality.curve import Stopped
    from diloco_studies.quality.engine import train

    told = 0.0

    def progress(share: float, last: float) -> bool:
        nonlocal told
        if share >= told:
            told = share + 0.01
            _news.put(News(number, share, last))
        return not _stop.is_set()

    if _stop.is_set():
        return None
    _news.put(News(number, 0.0, math.nan))
    look_again()
    try:
        result = train(run, device, progress)
        Store(folder).write(run, result)
    except Stopped:
        return None
    except DilocoError as error:
        return error
    except Exception as error:  # whatever it is, the other runs go on
        return DilocoError(f"{type(error).__name__}: {error}")
    return result
