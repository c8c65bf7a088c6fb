"""The event tape's archive on disk: one file a group, msgpack records one after another."""

import asyncio
from pathlib import Path
from typing import BinaryIO

from pipeline.codec import encode
from pipeline.ports import START, Bus, TapeEntry

BLOCK_S = 1.0
KEEP_UNTRIMMED = 10_000
"""Archived entries that stay on the bus, for readers that lag."""


class TapeArchive:
    """Follows all tapes of a run and appends them to `directory`; trims what is safely on disk."""

    def __init__(self, bus: Bus, groups: int, directory: Path) -> None:
        self._bus = bus
        self._cursors = dict.fromkeys(range(groups), START)
        self._behind: dict[int, list[str]] = {group: [] for group in range(groups)}
        directory.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, BinaryIO] = {
            group: (directory / f"{group}.msgpack").open("ab") for group in range(groups)
        }

    async def follow(self) -> None:
        """Archive until cancelled."""
        while True:
            await self._take(await self._bus.read_tape(self._cursors, BLOCK_S))

    async def finish(self) -> None:
        """Archive what is there now, and close the files."""
        while entries := await self._bus.read_tape(self._cursors):
            await self._take(entries)
        self.close()

    def close(self) -> None:
        """Close the files; what was taken is in them."""
        for file in self._files.values():
            file.close()

    async def _take(self, entries: list[TapeEntry]) -> None:
        for entry in entries:
            self._files[entry.group].write(encode(entry.record))
            self._cursors[entry.group] = entry.entry_id
            self._behind[entry.group].append(entry.entry_id)
        for group in {entry.group for entry in entries}:
            self._files[group].flush()
            ids = self._behind[group]
            if len(ids) >= 2 * KEEP_UNTRIMMED:
                await self._bus.trim_tape(group, ids[-KEEP_UNTRIMMED])
                self._behind[group] = ids[-KEEP_UNTRIMMED:]
        await asyncio.sleep(0)
