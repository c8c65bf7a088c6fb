"""How processes end: in two phases at a signal, and together with the process that started them.

Two phases: the first signal asks for an orderly end, the second one ends the process at once. A handler never
raises into the code it interrupts: it sets an event that the service waits on.

SIGHUP, of a closed terminal or a lost ssh, asks for the orderly end too, unless it is ignored (`nohup`). It comes twice
as a rule, from the kernel and from the shell, and with a SIGTERM from a session manager: so it never is the one signal
of two that ends a process at once.

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
AGAIN_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: who started this process should do so again. Of a party that was asked to end before its
run was finished, of a sweep of the lab that was, and of a rank that has lost another one."""
LAUNCHER_PID = "DILOCO_LAUNCHER_PID"
"""Variable with the id of the process that started this one, and that it is not to outlive."""


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


def die_with_launcher() -> None:
    """In a process that was given `LAUNCHER_PID`: do not outlive it. Does nothing in one that a user started."""
    launcher = os.environ.pop(LAUNCHER_PID, None)
    if launcher is not None:
        die_with_parent(int(launcher))


def exit_at_once() -> None:
    """End the process without any clean-up; what is committed is safe, what is not is lost."""
    try:
        sys.stderr.write("second signal: exiting at once\n")
        sys.stderr.flush()
    finally:  # nobody may read it any more
        os._exit(1)


def end_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask for an orderly end: SIGINT, SIGTERM, and SIGHUP if it is not ignored."""
    told = (signal.SIGINT, signal.SIGTERM)
    return told if _HANGUP is None or signal.getsignal(_HANGUP) is signal.SIG_IGN else (*told, _HANGUP)


def two_phases(first: Callable[[], object], second: Callable[[], object]) -> Callable[[int], None]:
    """What to do at each of `end_signals`: `first`, and `second` at every later SIGINT or SIGTERM."""
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
    """From now on a closed terminal ends nothing: what is left to do is short."""
    if _HANGUP is not None:
        signal.signal(_HANGUP, signal.SIG_IGN)


def ignore_end() -> None:
    """So does no request to end, but for Ctrl-C."""
    ignore_hangup()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def install_signal_handlers(
    loop: asyncio.AbstractEventLoop, event: asyncio.Event, second: Callable[[], object] = exit_at_once
) -> None:
    """Set `event` at the first of `end_signals`, call `second` as `two_phases` does. Main thread only."""
    handle = two_phases(event.set, second)
    for number in end_signals():
        loop.add_signal_handler(number, handle, number)


def stop_event() -> asyncio.Event:
    """An event of the running loop that is set by the first of `end_signals`. Main thread only."""
    event = asyncio.Event()
    install_signal_handlers(asyncio.get_running_loop(), event)
    return event


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  # an argument list of our own
