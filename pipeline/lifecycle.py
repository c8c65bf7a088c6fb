"""How processes end: in two phases at a signal, and together with the process that started them.

Two phases: the first signal asks for an orderly end, the second one ends the process at once. A handler never
raises into the code it interrupts: it sets an event that the service waits on.

`python -P lifecycle.py PID PROGRAM ...` runs a program that ends with its parent, process PID.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies. Linux only; does nothing elsewhere.

    It holds across an exec. Linux sends the signal when the *thread* that started this process ends, so it must be
    started from its parent's main thread. The parent may be dead already: then its pid is not our parent's.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> bool:
    """From now on descendants whose parent ends become children of this process, which can wait for them. Linux only;
    whether it is so."""
    return sys.platform == "linux" and not ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def exit_at_once() -> None:
    """End the process without any clean-up; what is committed is safe, what is not is lost."""
    sys.stderr.write("second signal: exiting at once\n")
    sys.stderr.flush()
    os._exit(1)


def install_signal_handlers(
    loop: asyncio.AbstractEventLoop, event: asyncio.Event, second: Callable[[], object] = exit_at_once
) -> None:
    """Set `event` at the first SIGINT or SIGTERM, call `second` at each later one. Main thread only."""

    def handle() -> None:
        if event.is_set():
            second()
        event.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, handle)


def stop_event() -> asyncio.Event:
    """An event of the running loop that is set by the first SIGINT or SIGTERM. Main thread only."""
    event = asyncio.Event()
    install_signal_handlers(asyncio.get_running_loop(), event)
    return event


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  # an argument list of our own
