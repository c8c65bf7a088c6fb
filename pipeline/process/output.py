"""Standard streams that are there, whatever a process was started with, and output and error that outlive who reads
them: a closed terminal or pipe, a full disk end no training.

What can be written no more goes to a file instead (a refuge), else nowhere.
"""

import errno
import io
import os
import sys
from pathlib import Path
from typing import TextIO

_GONE = (errno.EPIPE, errno.EIO)
"""The pipe's reader has ended; the terminal is closed."""

_NOWHERE = Path(os.devnull)
_refuge = _NOWHERE


class _Lasting(io.FileIO):
    """A descriptor that is never closed, and to which writing never fails."""

    def write(self, data: "bytes | bytearray | memoryview") -> int | None:  # type: ignore[override]  # what is written
        left = memoryview(data).cast("B")
        for refuge in (_refuge, _NOWHERE):
            try:
                written = super().write(left)
                return len(data) if written is None else len(data) - len(left) + written  # None: it is full
            except OSError as error:
                if error.errno not in _GONE:
                    break  # a full disk: these bytes are lost, later ones may not be
                _redirect(self.fileno(), refuge)
                while left and left[0] & 0xC0 == 0x80:  # the reader had the first bytes of this character
                    left = left[1:]
        return len(data)


def _redirect(descriptor: int, file: Path) -> None:
    """Whoever writes to the descriptor from now on writes to the end of the file."""
    try:
        there = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        there = os.open(_NOWHERE, os.O_WRONLY)
    os.dup2(there, descriptor)
    os.close(there)


def open_all() -> None:
    """As a process begins: streams that are closed (`>&-`) lead nowhere, and what a stream has no character for is `?`.

    Else the next file or socket would get the descriptor, which uvloop takes for the stream's, and ends the process.
    """
    while (there := os.open(_NOWHERE, os.O_RDWR)) <= 2:
        os.set_inheritable(there, True)
    os.close(there)
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:  # it was closed before a program of the user's own began
        return _NOWHERE.open("w")
    stream.flush()
    raw: io.RawIOBase = _Lasting(descriptor, "w", closefd=False)
    through = getattr(stream, "write_through", False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", None, True, through)


def outlive_readers(refuge: Path | None = None) -> None:
    """Have `sys.stdout` and `sys.stderr` go on when nobody reads them any more, and what they are told go to `refuge`.

    May be called again, for another refuge. Streams that somebody has put in their place stay.
    """
    global _refuge  # one for both streams, as there is one of each for a process
    _refuge = refuge or _refuge
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lasting(sys.stdout, 1)
    outlive_errors_reader()


def outlive_errors_reader() -> None:
    """The same for `sys.stderr` alone, of a command whose output is for its reader."""
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lasting(sys.stderr, 2)
