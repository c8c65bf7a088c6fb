"""Who reads a run's tapes on and on, through every failover, as archives and pages do. asyncio."""

import asyncio
from collections import Counter
from collections.abc import Iterator

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.tape_reading import TapeReader
from diloco.pipeline.errors import BusError
from diloco.pipeline.messages.fragment import Committed, TapeRecord
from diloco.pipeline.payload.codec import decode_tape
from diloco_studies.virtual.memory_store import Stream
from tests.world.link import Link
from tests.world.record import Seen

BLOCK_S = 1.0
RETRY_S = 0.1


class Archive:
    """One that lives as long as its world."""

    def __init__(self, link: Link, groups: int) -> None:
        self.link, self._groups = link, groups
        self._reader = TapeReader(link, groups)  # type: ignore[arg-type]  # a link is every method of a bus
        self.records: list[TapeRecord] = []

    async def follow(self, block_s: float = BLOCK_S) -> None:
        """Until cancelled; with `block_s` 0 until the end of what is there."""
        while True:
            try:
                entries = await self._reader.read(block_s)
            except BusError:
                await asyncio.sleep(RETRY_S)
                continue
            for entry in entries:
                self.records.append(entry.record)
                self._reader.passed(entry)
            if not (entries or block_s):
                return

    def problems(self, seen: Seen, keys: RunKeys) -> Iterator[tuple[str, str]]:
        """What is wrong with the tapes as they stand now, and with what was read of them: promises and details."""
        read = Counter(self.records)
        for group in range(self._groups):
            found = seen.values.get(keys.tape(group))
            records = [decode_tape(data) for data in found.data] if isinstance(found, Stream) else []
            if missed := [one for one in records if one not in read]:
                yield "who follows a tape reads all of it", f"group {group}: not {missed[:3]} of {len(missed)}"
            made: dict[tuple[int, int], bytes] = {}
            for one in records:
                if (
                    isinstance(one, Committed)
                    and made.setdefault((one.fragment, one.version), one.digest) != one.digest
                ):
                    yield "a version has one digest on the tape", f"fragment {one.fragment} version {one.version}"
