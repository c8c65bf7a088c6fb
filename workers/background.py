"""Threads beside the training thread."""

import os
import threading
from contextlib import suppress


def yield_core() -> None:
    """Called in a background thread: its wake-ups must not take the core from the training thread."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # where that is not allowed, it only costs a little
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
