"""Cores that a process may use, and the threads of numpy's BLAS, which by default takes all cores."""

import os
import time

import numpy as np
import threadpoolctl

from diloco.pipeline.outer_cost import Speed
from diloco.pipeline.process.cgroup import limits

# If one of these is set, the user has chosen the threads. OMP_NUM_THREADS does not count: it is about torch.
CHOSEN_BY = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def seen_cores() -> int:
    """Return the cores that this process may run on. torch starts a thread for each, whatever a container's quota."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """Return the whole cores that this process's affinity and its container's CPU quota allow, at least 1."""
    return max(1, int(min(seen_cores(), limits().cores)))


def one_blas_thread() -> None:
    """Limit numpy's matrix products in this process to one thread, unless the user has chosen otherwise.

    For processes that share a machine: a BLAS thread that waits for others spins, and takes a core from processes that
    have work. A syncer merges its fragments in parallel anyway, each in a thread of its own.
    """
    if not any(os.environ.get(name) for name in CHOSEN_BY):
        threadpoolctl.threadpool_limits(1, user_api="blas")


def blas_threads() -> int:
    """Return the number of threads that numpy's matrix products use now."""
    pools = threadpoolctl.threadpool_info()
    return max((pool["num_threads"] for pool in pools if pool["user_api"] == "blas"), default=1)


_SIDE, _PRODUCTS = 512, 6


def product_speed() -> Speed:
    """Measure how fast numpy multiplies matrices here, on its current threads, in about 20 ms of a core.

    The fastest of a few products counts: the first one starts threads and touches its memory for the first time.
    """
    one = np.ones((_SIDE, _SIDE), np.float32)
    took_s = []
    for _ in range(_PRODUCTS):
        began = time.perf_counter()
        np.matmul(one, one)
        took_s.append(time.perf_counter() - began)
    threads = blas_threads()
    return Speed(2 * _SIDE**3 / min(took_s), max(1, usable_cores() // threads), threads)
