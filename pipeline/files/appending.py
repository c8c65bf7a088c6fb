"""Appending to a file completely or not at all, even when the disk is full."""

import io
from contextlib import suppress


def append_whole(file: io.FileIO, data: bytes) -> None:
    """Append to an unbuffered file opened for appending, of which this is the only writer.

    Raises:
        OSError: the file cannot be written; it is truncated to its previous end.
    """
    end, rest = file.seek(0, io.SEEK_END), memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) or 0 :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise
