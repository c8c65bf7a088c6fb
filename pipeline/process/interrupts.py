"""Ctrl-C while a command's modules are imported, or while the interpreter shuts down after it: it ends at once.

Nothing has begun, or all is done. KeyboardInterrupt would show up as an import's traceback, change the exit status, or
make a library conclude that an optional part of it is missing.

`sys.excepthook` shows how a learner's own program ends: by Ctrl-C without a traceback, or by a refusal in one line.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

from diloco.pipeline.errors import DilocoError, exit_status

Leave = Callable[[BaseException], object]
# Called when Ctrl-C ends the program.
_leaving: list[Leave] = []
# The hook for uncaught errors that was there before this module's, once that is installed.
_before: list[Callable[..., object]] = []
# Time of the last `left_just_now`, and how long an uncaught Ctrl-C may take from there to the hook.
_left_s = [-math.inf]
JUST_S = 5.0
# The exit status that shells report for a process ended by Ctrl-C (128 + SIGINT).
INTERRUPTED_STATUS = 130


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED_STATUS)


def end_at_once() -> None:
    """Make Ctrl-C end this process silently; where SIGINT is ignored, as by `nohup`, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def restore_keyboard_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, if `end_at_once` had changed that."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def without_traceback(error: BaseException) -> None:
    """Print no traceback if this error ends the program. A program that catches it sees it as it is.

    After Ctrl-C nothing is printed: the learner has left its run, and nothing has failed. Of a DilocoError the message
    is printed, unless the program has a hook of its own, and the exit status is that of a command.
    """
    if isinstance(error, (KeyboardInterrupt, DilocoError)):
        error.__dict__["_without_traceback"] = True
        _install()


def on_interrupt(leave: Leave) -> None:
    """Call `leave` if Ctrl-C ends the program, in the place of a traceback, until `off_interrupt`."""
    _leaving.append(leave)
    _install()


def off_interrupt(leave: Leave) -> None:
    """Undo `on_interrupt`, if that was called."""
    if leave in _leaving:
        _leaving.remove(leave)


def left_just_now() -> None:
    """Print no traceback if it is Ctrl-C that has ended a learner's loop: if it ends the program now, not later."""
    _left_s[0] = time.monotonic()
    _install()


def _install() -> None:
    if _before:
        return
    _before.append(sys.excepthook)
    sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    known = hasattr(error, "_without_traceback")
    if isinstance(error, KeyboardInterrupt):
        leaving = [*_leaving]
        for leave in leaving:
            leave(error)
        if leaving or known or time.monotonic() < _left_s[0] + JUST_S:
            return
    elif known and isinstance(error, DilocoError) and not (hasattr(sys, "ps1") or sys.flags.inspect):
        if _before[0] is sys.__excepthook__:
            sys.stderr.write(f"error: {error}\n")
        else:
            _before[0](kind, error, trace)
        sys.exit(exit_status(error))  # Python ends with the status of a SystemExit that its hook raises
    _before[0](kind, error, trace)


def end_with(status: int) -> None:
    """Make Ctrl-C end this process at once with `status`: all work and output is done."""
    with suppress(OSError, ValueError):  # it is closed, or its reader is gone
        sys.stdout.flush()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(status))
