"""How processes end: in two phases on signals, and together with the process that started them.

The first signal requests an orderly end, the second one ends the process at once. A handler sets an event that the
service waits on. SIGHUP (a closed terminal) also requests the orderly end, unless it is ignored (`nohup`), but never
ends a process at once: it usually comes twice, and with SIGTERM from a session manager.

`python -P signals.py PID PROGRAM ...` runs a program that ends with its parent, process PID.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable

_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# EX_TEMPFAIL of sysexits.h: whatever started this process should start it again. It is the status of a party, or a
# sweep of the lab, that was asked to end before it was finished, and of a rank that has lost another rank.
AGAIN_STATUS = 75
# Environment variable with the id of the process that started this one and that it must not outlive.
LAUNCHER_PID = "DILOCO_LAUNCHER_PID"


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, however it dies. Linux only; elsewhere it does nothing.

    It stays in force across an exec. Linux sends the signal when the *thread* that started this process ends, so the
    process must be started from its parent's main thread. If the parent has died already, this process exits.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above, so no signal will come
        os._exit(1)


def die_with_launcher() -> None:
    """Do not outlive the process in `LAUNCHER_PID`. Does nothing if a user started this process."""
    launcher = os.environ.pop(LAUNCHER_PID, None)
    if launcher is not None:
        die_with_parent(int(launcher))


def exit_at_once() -> None:
    """End the process without clean-up. What is committed is safe; anything else is lost."""
    try:
        sys.stderr.write("second signal: exiting at once\n")
        sys.stderr.flush()
    finally:  # the reader of stderr may be gone
        os._exit(1)


def end_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that request an orderly end: SIGINT, SIGTERM, and SIGHUP if it is not ignored."""
    told = (signal.SIGINT, signal.SIGTERM)
    return told if _HANGUP is None or signal.getsignal(_HANGUP) is signal.SIG_IGN else (*told, _HANGUP)


def two_phases(first: Callable[[], object], second: Callable[[], object]) -> Callable[[int], None]:
    """Return a handler for `end_signals` that calls `first`, and `second` at every later SIGINT or SIGTERM."""
    told = False

    def handle(number: int) -> None:
        nonlocal told
        if number == _HANGUP:
            first()
            return
        if told:
            second()
        told = True
        first()

    return handle


def ignore_hangup() -> None:
    """Ignore a closed terminal from now on: the remaining work is short."""
    if _HANGUP is not None:
        signal.signal(_HANGUP, signal.SIG_IGN)


def ignore_end() -> None:
    """Ignore all requests to end from now on, except Ctrl-C."""
    ignore_hangup()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def install_signal_handlers(
    loop: asyncio.AbstractEventLoop, event: asyncio.Event, second: Callable[[], object] = exit_at_once
) -> None:
    """Set `event` at the first of `end_signals`, and call `second` as in `two_phases`. Main thread only."""
    handle = two_phases(event.set, second)
    for number in end_signals():
        loop.add_signal_handler(number, handle, number)


def stop_event() -> asyncio.Event:
    """Return an event of the running loop that the first of `end_signals` sets. Main thread only."""
    event = asyncio.Event()
    install_signal_handlers(asyncio.get_running_loop(), event)
    return event


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  # the argument list is our own
