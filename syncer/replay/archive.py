"""The event tape's archive on disk: concatenated msgpack records, in one file for each group and writer.

Every syncer archives all tapes, each into its own files; readers of an archive take each record once. A server that
took over may lack entries of its predecessor's tape: then its whole tape is archived once more (`tape_reading`).

Only the lead trims the tapes, and only what it has on its own disk, except for `KEEP_UNTRIMMED` entries. If another
syncer's disk fails, the lead's archive has what that one lacks. A lead without an archive trims by age (`tape_kept_s`),
and what a failing disk missed by then is in no archive.
"""

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import structlog

from diloco.pipeline.bus.ports import Tape, TapeEntry
from diloco.pipeline.bus.schema import entry_id
from diloco.pipeline.bus.tape_reading import TapeReader
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import PeerError, UsageError
from diloco.pipeline.files.appending import append_whole
from diloco.pipeline.files.writable import error_text
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.transfer.payloads import Offload
from diloco.syncer.replay.disk import Disk
from diloco.syncer.times import TIMES

# Archived entries that stay on the bus, for readers that lag.
KEEP_UNTRIMMED = 10_000
# Errors that mean that a file was deleted or moved.
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class TapeArchive:
    """Follows all tapes of a run and writes them to `directory`; trims what is safely on disk."""

    def __init__(
        self,
        bus: Tape,
        groups: int,
        directory: Path,
        writer: str,
        trims: Callable[[], bool],
        offload: Offload = asyncio.to_thread,
    ) -> None:
        """Create the files. `writer` is unique in the folder, even compared with an earlier life of this syncer.

        Raises:
            UsageError: the folder cannot be written.
        """
        self._bus, self._trims, self._disk = bus, trims, Disk(offload)
        self._directory, self._writer = directory, writer
        self._reader = TapeReader(bus, groups)
        self._newest: dict[int, deque[str]] = {group: deque(maxlen=KEEP_UNTRIMMED) for group in range(groups)}
        self._untrimmed = dict.fromkeys(range(groups), 0)
        self.problem = ""
        """Why the archive lacks entries of the tape, in words; "" if it lacks none."""
        self._made: dict[int, os.stat_result] = {}
        """Identity of each group's file."""
        try:
            for group in self._newest:
                self._create(group)
        except OSError as error:
            raise UsageError(f"--tape-dir: cannot write to {directory}: {error_text(error)}") from error

    async def follow(self) -> None:
        """Archive until cancelled; entries that could not be written are read from the tape again."""
        while True:
            try:
                await self._append(await self._reader.read(BUS_TIMES.block_s))
                self.problem = ""
            except (OSError, PeerError) as error:
                if not self.problem:
                    self.log_failure(error)
                self.problem = f"the tape cannot be archived (will be retried): {error}"
                await asyncio.sleep(TIMES.retry_s)

    def log_failure(self, error: OSError | PeerError) -> None:
        """Log that entries could not be written."""
        safe = "the tape stays on the bus"
        structlog.get_logger().error("tape_not_archived", path=str(self._directory), error=str(error), safe=safe)

    async def finish(self) -> None:
        """Archive all entries that are on the tapes now.

        Raises:
            OSError: it cannot be written.
            PeerError: the bus holds no tape where one should be.
        """
        for group in self._newest:
            await self._put(group, b"")
        while entries := await self._reader.read():
            await self._append(entries)

    def _path(self, group: int) -> Path:
        return self._directory / f"{group}-{self._writer}.msgpack"

    def _create(self, group: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        with FileIO(self._path(group), "ab") as file:
            self._made[group] = os.fstat(file.fileno())

    def _write(self, group: int, data: bytes) -> None:
        # Each time by its path, and without creating it: nobody reads what is appended to a file that was moved away.
        with FileIO(os.open(self._path(group), os.O_WRONLY | os.O_APPEND), "ab") as file:
            if not os.path.samestat(os.fstat(file.fileno()), self._made[group]):
                raise FileNotFoundError(errno.ENOENT, "another file is there")
            append_whole(file, data)

    async def _put(self, group: int, data: bytes) -> bool:
        """Append to a group's file; return False if it was deleted or moved: the tape is then read from its start."""
        try:
            await self._disk.do(self._write, group, data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._reader.forget(group)
            await self._disk.do(self._create, group)
            safe = "everything that the tape still has is archived again"
            structlog.get_logger().error("tape_archive_gone", file=str(self._path(group)), safe=safe)
            return False
        return True

    async def _append(self, entries: list[TapeEntry]) -> None:
        by_group: dict[int, list[TapeEntry]] = {}
        for entry in entries:
            by_group.setdefault(entry.group, []).append(entry)
        for group, theirs in by_group.items():
            data = b"".join(encode(entry.record) for entry in theirs)
            if not await self._put(group, data):
                continue
            self._reader.passed(theirs[-1])
            newest = self._newest[group]
            # The tape is read from its start again: a new server's, or because the archive file was gone.
            if newest and entry_id(theirs[0].entry_id) <= entry_id(newest[-1]):
                newest.clear()
                self._untrimmed[group] = 0
            newest.extend(entry.entry_id for entry in theirs)
            self._untrimmed[group] += len(theirs)
            if self._untrimmed[group] >= 2 * KEEP_UNTRIMMED and self._trims():
                await self._bus.trim_tape(group, newest[0])
                self._untrimmed[group] = KEEP_UNTRIMMED
        await asyncio.sleep(0)
