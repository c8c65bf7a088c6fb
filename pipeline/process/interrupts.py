"""Ctrl-C while a command is imported, which is most of its first second: nothing is begun then, so the process ends.

An exception would come up as an import's traceback, or be taken by a library for a part of itself that is missing.

And Ctrl-C once a command has ended: the interpreter takes a while to end too, and would be killed by it.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

INTERRUPTED_STATUS = 130
"""As shells have it, of a process that Ctrl-C has ended."""


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED_STATUS)


def end_at_once() -> None:
    """From now on Ctrl-C ends this process without a word; where it is ignored, as by `nohup`, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on it interrupts the main thread as usual, if it was as above."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with(status: int) -> None:
    """From now on Ctrl-C ends this process at once with its exit status, which stands: all is done and said."""
    with suppress(OSError, ValueError):  # closed, or nobody reads it
        sys.stdout.flush()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(status))
