"""The event tape's archive on disk: files of msgpack records one after another, one for each group and writer.

Every syncer archives all tapes, each into files of its own, so that killing any of them loses nothing; who reads an
archive takes each record once. The lead alone trims the tapes, of what it has on disk itself; `KEEP_UNTRIMMED`
entries stay for readers that lag, the other archives among them.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from pipeline.codec import encode
from pipeline.ports import START, Bus, TapeEntry

BLOCK_S = 1.0
KEEP_UNTRIMMED = 10_000
"""Archived entries that stay on the bus, for readers that lag."""


class TapeArchive:
    """Follows all tapes of a run and writes them to `directory`; trims what is safely on disk."""

    def __init__(self, bus: Bus, groups: int, directory: Path, writer: str, trims: Callable[[], bool]) -> None:
        """`writer`: hex digits that nobody else has, an earlier life of this syncer included."""
        self._bus, self._trims = bus, trims
        self._cursors = dict.fromkeys(range(groups), START)
        self._newest: dict[int, deque[str]] = {group: deque(maxlen=KEEP_UNTRIMMED) for group in range(groups)}
        self._untrimmed = dict.fromkeys(range(groups), 0)
        directory.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, BinaryIO] = {
            group: (directory / f"{group}-{writer}.msgpack").open("ab") for group in range(groups)
        }

    async def follow(self) -> None:
        """Archive until cancelled."""
        while True:
            await self._take(await self._bus.read_tape(self._cursors, BLOCK_S))

    async def finish(self) -> None:
        """Archive what is there now."""
        while entries := await self._bus.read_tape(self._cursors):
            await self._take(entries)

    def close(self) -> None:
        """Close the files; what was taken is in them."""
        for file in self._files.values():
            file.close()

    async def _take(self, entries: list[TapeEntry]) -> None:
        for entry in entries:
            self._files[entry.group].write(encode(entry.record))
            self._cursors[entry.group] = entry.entry_id
            self._newest[entry.group].append(entry.entry_id)
            self._untrimmed[entry.group] += 1
        for group in {entry.group for entry in entries}:
            self._files[group].flush()
            if self._untrimmed[group] >= 2 * KEEP_UNTRIMMED and self._trims():
                await self._bus.trim_tape(group, self._newest[group][0])
                self._untrimmed[group] = KEEP_UNTRIMMED
        await asyncio.sleep(0)
