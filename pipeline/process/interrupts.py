"""Ctrl-C while a command's modules are imported, or while the interpreter shuts down after it: it ends at once.

Nothing has begun, or all is done. KeyboardInterrupt would show up as an import's traceback, change the exit status, or
make a library conclude that an optional part of it is missing.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

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


def on_interrupt(leave: Callable[[], object]) -> None:
    """Call `leave` instead of printing a traceback if Ctrl-C ends this program; a program that catches it sees it."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            leave()
        else:
            before(kind, error, trace)

    sys.excepthook = show


def end_with(status: int) -> None:
    """Make Ctrl-C end this process at once with `status`: all work and output is done."""
    with suppress(OSError, ValueError):  # it is closed, or its reader is gone
        sys.stdout.flush()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(status))
