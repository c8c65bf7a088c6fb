"""Cores that a process may use, and how many of them the linear algebra below numpy takes: all, if nobody tells it."""

import os
import time

import numpy as np
import threadpoolctl

from diloco.pipeline.outer_cost import Speed
from diloco.pipeline.process.cgroup import limits

CHOSEN_BY = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
"""Whoever sets one of these has chosen; OMP_NUM_THREADS is about torch."""


def seen_cores() -> int:
    """Cores that this process may run on: torch takes a thread for each, also where a container has less time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """Of these, as many as this process's container has time for: whole ones, at least 1."""
    return max(1, int(min(seen_cores(), limits().cores)))


def one_blas_thread() -> None:
    """From now on numpy's products take one thread in this process, unless the user has chosen otherwise.

    For processes that share a machine: a BLAS thread that waits for the others spins, and takes a core from whoever has
    work. A syncer's fragments merge beside each other anyway, each in a thread of its own.
    """
    if not any(os.environ.get(name) for name in CHOSEN_BY):
        threadpoolctl.threadpool_limits(1, user_api="blas")


def blas_threads() -> int:
    """Those that numpy's products take now."""
    pools = threadpoolctl.threadpool_info()
    return max((pool["num_threads"] for pool in pools if pool["user_api"] == "blas"), default=1)


_SIDE, _PRODUCTS = 512, 6


def product_speed() -> Speed:
    """How fast numpy multiplies matrices here and now, on as many threads as it takes; 20 ms of a usual core.

    The fastest of a few products counts: the first one wakes threads and touches its memory for the first time.
    """
    one = np.ones((_SIDE, _SIDE), np.float32)
    took_s = []
    for _ in range(_PRODUCTS):
        began = time.perf_counter()
        np.matmul(one, one)
        took_s.append(time.perf_counter() - began)
    threads = blas_threads()
    return Speed(2 * _SIDE**3 / min(took_s), max(1, usable_cores() // threads), threads)
