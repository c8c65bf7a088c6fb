"""Python's end waits for threads of gloo: one that needs Python's lock while Python ends aborts the process.

Such a thread tells that a sum is there, and lets go of its tensor afterwards, for which it needs that lock. On a busy
machine Python may end in between. Destroying process groups does not end the threads of one that something still
refers to, as a sharded model does (pytorch/pytorch#190489, pytorch/pytorch#38228).
"""

import sys
import time
from contextlib import suppress
from pathlib import Path

THREADS = Path("/proc/self/task")
"""Of this process, where the system is Linux."""
NAME = "pt_gloo_runloop"
"""Of a thread that does what a group of gloo has to do; by torch."""
MOST_S = 10.0
LOCK_WAITS = 2
"""Looks are so many times apart as a thread that waits for Python's lock sleeps at most."""


def rest() -> None:
    """Wait until no thread of gloo has anything left to do. Called as Python ends, when all is done.

    One that was asleep at two looks, and not once awake in between, has nothing to do: Python's lock was free, and who
    waits for that wakes up again and again. One that waits for a rank is asleep too, and is not waited for.
    """
    until_s, before = time.monotonic() + MOST_S, None
    while (now := _looked()) and not (now == before and all(_SLEEPS in one for one in now.values())):
        if time.monotonic() > until_s:
            return
        before = now
        time.sleep(LOCK_WAITS * sys.getswitchinterval())


_SLEEPS = "State:\tS (sleeping)"
_TOLD = "State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"


def _looked() -> dict[str, list[str]]:
    """Of each of gloo's threads: whether it sleeps, and how often it was awake."""
    found = {}
    for thread in THREADS.iterdir() if THREADS.exists() else ():
        with suppress(OSError):  # it ends now
            name, *lines = (thread / "status").read_text().splitlines()
            if name.endswith(NAME):
                found[thread.name] = [line for line in lines if line.startswith(_TOLD)]
    return found
