"""Appending to a file all of something or nothing, also where the disk is full."""

import io
from contextlib import suppress


def append_whole(file: io.FileIO, data: bytes) -> None:
    """Append to a file that was opened for that, without a buffer, and that nobody else writes.

    Raises:
        OSError: it cannot be written; the file ends as before.
    """
    end, rest = file.seek(0, io.SEEK_END), memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) or 0 :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise
