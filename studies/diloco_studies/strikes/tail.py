"""Losing the last second of a Redis's append-only file, as a machine does that fails before it has written to disk.

A killed process loses nothing of what it has written: that lies with the operating system. So the file's size is
noted while the server lives, and after its end the file is cut to what it held a second earlier.
"""

import os
from collections import deque
from pathlib import Path

from diloco.pipeline.bus.embedded import EmbeddedRedis

LOST_S = 1.0
"""What `appendfsync everysec` may lose."""


def append_only_file(server: EmbeddedRedis) -> Path | None:
    """The one that grows: Redis 6's only one, or the newest increment of later ones."""
    folder = server.socket_path.parent
    increments = sorted(folder.glob("appendonlydir/*.incr.aof"), key=lambda path: int(path.name.split(".")[2]))
    single = folder / "appendonly.aof"
    return increments[-1] if increments else single if single.is_file() else None


class Tail:
    """The growth of an append-only file. Not for a file that is written to while it is cut."""

    def __init__(self) -> None:
        self._sizes: deque[tuple[float, int, int]] = deque()
        """(time, inode, size): the last one before the last second, and those since."""

    def note(self, now_s: float, file: Path | None) -> None:
        """Remember how large it is now; None: there is none yet."""
        if file is None:
            return
        found = file.stat()
        self._sizes.append((now_s, found.st_ino, found.st_size))
        while len(self._sizes) > 1 and self._sizes[1][0] <= now_s - LOST_S:
            self._sizes.popleft()

    def lose(self, now_s: float, file: Path | None) -> int:
        """Cut off what was written since a second before now; returns how many bytes.

        A file that is younger (the server has just rewritten it) loses what came since it was first seen.
        """
        if file is None:
            return 0
        now = file.stat()
        kept = now.st_size
        for at_s, inode, size in reversed(self._sizes):
            if inode == now.st_ino:
                kept = min(kept, size)
                if at_s <= now_s - LOST_S:
                    break
        os.truncate(file, kept)
        self._sizes.clear()
        return now.st_size - kept
