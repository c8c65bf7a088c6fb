"""Makes Python's exit wait for gloo's threads: one that needs the GIL while Python shuts down aborts the process.

Such a thread reports that an all-reduce is complete and releases its tensor afterwards, for which it needs the GIL. On
a busy machine Python may shut down in between. Destroying the process groups does not end the threads of a group that
something still refers to, as a sharded model does (pytorch/pytorch#190489, pytorch/pytorch#38228).
"""

import sys
import time
from contextlib import suppress
from pathlib import Path

# The threads of this process; exists only on Linux.
THREADS = Path("/proc/self/task")
# The name that torch gives to a thread that does a gloo group's work.
NAME = "pt_gloo_runloop"
MOST_S = 10.0
# Two looks are this many switch intervals apart. A thread that waits for the GIL wakes up once per interval, so between
# two looks it must have been awake.
LOCK_WAITS = 2


def rest() -> None:
    """Wait until no gloo thread has anything left to do. Called when Python exits, after everything else is done.

    A thread that sleeps at two successive looks and did not wake up in between has nothing to do: the GIL was free, and
    a thread that waits for the GIL wakes up again and again. A thread that waits for another rank sleeps as well, and
    is not waited for.
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
    """Return for each gloo thread whether it sleeps, and how often it was switched out."""
    found = {}
    for thread in THREADS.iterdir() if THREADS.exists() else ():
        with suppress(OSError):  # the thread has just ended
            name, *lines = (thread / "status").read_text().splitlines()
            if name.endswith(NAME):
                found[thread.name] = [line for line in lines if line.startswith(_TOLD)]
    return found
