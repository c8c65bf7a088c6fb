"""Standard streams that always exist, and output that survives its reader.

A closed terminal, a closed pipe or a full disk must not end a training run. Output that can no longer be written goes
to a file instead (the refuge), or nowhere.
"""

import errno
import io
import os
import sys
from pathlib import Path
from typing import TextIO

# Errors after which a stream is redirected: the pipe's reader has ended, or the terminal is closed.
_GONE = (errno.EPIPE, errno.EIO)

_NOWHERE = Path(os.devnull)
_refuge = _NOWHERE


class _UnclosableStream(io.FileIO):
    """A raw stream whose descriptor is never closed, and whose writes never fail."""

    def write(self, data: "bytes | bytearray | memoryview") -> int | None:  # type: ignore[override]  # a buffer
        left = memoryview(data).cast("B")
        for refuge in (_refuge, _NOWHERE):
            try:
                written = super().write(left)
                return len(data) if written is None else len(data) - len(left) + written  # None: a pipe is full
            except OSError as error:
                if error.errno not in _GONE:
                    break  # a full disk: these bytes are lost, later ones may not be
                _redirect(self.fileno(), refuge)
                while left and left[0] & 0xC0 == 0x80:  # the first bytes of this character went to the reader
                    left = left[1:]
        return len(data)


def _redirect(descriptor: int, file: Path) -> None:
    """Make the descriptor refer to the end of `file`, for all later writes to it."""
    try:
        there = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        there = os.open(_NOWHERE, os.O_WRONLY)
    os.dup2(there, descriptor)
    os.close(there)


def open_all() -> None:
    """Open closed standard streams (`>&-`) on /dev/null, and print `?` for characters that a stream cannot encode.

    Must be called first in a process. Otherwise the next file or socket would get the free descriptor 0, 1 or 2, which
    uvloop takes for a standard stream, and ends the process.
    """
    while (there := os.open(_NOWHERE, os.O_RDWR)) <= 2:
        os.set_inheritable(there, True)
    os.close(there)
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _unclosable(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:  # it was closed before a user's own program started
        return _NOWHERE.open("w")
    stream.flush()
    raw: io.RawIOBase = _UnclosableStream(descriptor, "w", closefd=False)
    through = getattr(stream, "write_through", False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", None, True, through)


def survive_closed_pipes(refuge: Path | None = None) -> None:
    """Make writes to `sys.stdout` and `sys.stderr` go to `refuge` once their reader is gone.

    May be called again with another refuge. Streams that somebody has replaced are left alone.
    """
    global _refuge  # per process, like the streams themselves
    _refuge = refuge or _refuge
    if sys.stdout is sys.__stdout__:
        sys.stdout = _unclosable(sys.stdout, 1)
    survive_closed_stderr()


def survive_closed_stderr() -> None:
    """Do the same only for `sys.stderr`, in a command whose standard output only matters to its reader."""
    if sys.stderr is sys.__stderr__:
        sys.stderr = _unclosable(sys.stderr, 2)
