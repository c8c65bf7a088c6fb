"""Continuous reading of tapes, even across a failover. Runs on asyncio.

A server that takes over may lack entries that its predecessor had acknowledged, and its clock may be behind. Then new
entries have lower ids than the last one read, and a reader that continues from its cursor never sees them. It need not
notice any error either, if it had no call in flight during the failover. So before a reader accepts new entries, it
checks that the last entry it has read still exists. If it does not, the reader starts again from the tape's start: it
sees some records twice, but misses none.
"""

from collections.abc import Sequence

from diloco.pipeline.bus.ports import START, Tape, TapeEntry
from diloco.pipeline.bus.schema import entry_id
from diloco.pipeline.errors import BusUnavailable

_GREATEST = 2**64 - 1


class TapeReader:
    """A reader of a run's tapes, with its position in each."""

    def __init__(self, bus: Tape, groups: int) -> None:
        self._bus = bus
        self._last: dict[int, TapeEntry | None] = dict.fromkeys(range(groups))

    async def read(self, block_s: float = 0.0) -> list[TapeEntry]:
        """Return the entries after those that were passed; wait up to `block_s` for the first.

        Raises:
            BusError: nothing was lost; call it again.
        """
        while True:
            found = await self._bus.read_tape(self._cursors(), block_s)
            # Check after the read: a failover between a check and a later read would go unnoticed.
            of = {entry.group for entry in found} or self._last.keys()
            away = set[int]()
            gone = await lost(self._bus, [last for group in of if (last := self._last[group]) is not None], away)
            self._last |= dict.fromkeys(gone)
            sure = [entry for entry in found if entry.group not in gone | away]
            if sure or not gone | away:
                return sure
            if not gone:
                raise BusUnavailable(f"the servers of groups {', '.join(map(str, sorted(away)))} are not answering")

    def passed(self, entry: TapeEntry) -> None:
        """Mark an entry as processed: it is returned again only if its tape is read from the start."""
        self._last[entry.group] = entry

    def forget(self, group: int) -> None:
        """Read a group's tape from its start."""
        self._last[group] = None

    def _cursors(self) -> dict[int, str]:
        return {group: START if last is None else last.entry_id for group, last in self._last.items()}


async def lost(bus: Tape, entries: Sequence[TapeEntry], away: set[int]) -> set[int]:
    """Return the groups whose entry no longer exists on the tape.

    Args:
        bus: to read from.
        entries: at most one of each group.
        away: receives the groups whose server does not answer.

    Raises:
        BusError: the bus cannot be read.
    """
    first: dict[int, TapeEntry] = {}
    before = {one.group: previous_id(one.entry_id) for one in entries}
    for found in await bus.read_tape(before, limit=1, away=away) if before else ():
        first.setdefault(found.group, found)
    return {one.group for one in entries if first.get(one.group) != one} - away


def previous_id(at: str) -> str:
    """Return the greatest entry id below the given one."""
    ms, number = entry_id(at)
    return f"{ms}-{number - 1}" if number else f"{ms - 1}-{_GREATEST}"
