"""Cores that a process may use, and how many of them the linear algebra below numpy takes: all, if nobody tells it."""

import os

import threadpoolctl

CHOSEN_BY = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
"""Whoever sets one of these has chosen; OMP_NUM_THREADS is about torch."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_blas_thread() -> None:
    """From now on numpy's products take one thread in this process, unless the user has chosen otherwise.

    For processes that share a machine: a BLAS thread that waits for the others spins, and takes a core from whoever has
    work. A syncer's fragments merge beside each other anyway, each in a thread of its own.
    """
    if not any(os.environ.get(name) for name in CHOSEN_BY):
        threadpoolctl.threadpool_limits(1, user_api="blas")
