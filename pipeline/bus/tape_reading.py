"""Reading tapes on and on, also where another server takes over. asyncio.

A server that takes over may lack what its predecessor had acknowledged, and its clock may be behind. Then what comes
next has lower ids than what was read last, and whoever reads on from there never sees it. So after any error a reader
looks whether the entry that it read last is still there. If it is not, it reads the tape from its start: it is told
some records once more, and none is missing.
"""

from collections.abc import Sequence

from diloco.pipeline.bus.ports import START, Tape, TapeEntry
from diloco.pipeline.bus.stored_values import entry_id

_GREATEST = 2**64 - 1


class TapeReader:
    """How far somebody has read the tapes of a run."""

    def __init__(self, bus: Tape, groups: int) -> None:
        self._bus = bus
        self._last: dict[int, TapeEntry | None] = dict.fromkeys(range(groups))
        self._sure = True

    async def read(self, block_s: float = 0.0) -> list[TapeEntry]:
        """What comes behind the entries that were passed; waits up to `block_s` for the first.

        Raises:
            BusError: call it again.
        """
        sure, self._sure = self._sure, False
        if not sure:
            await self._look_back()
        found = await self._bus.read_tape(self._cursors(), block_s)
        self._sure = True
        return found

    def passed(self, entry: TapeEntry) -> None:
        """An entry is dealt with: it is read again only from a tape that lacks it."""
        self._last[entry.group] = entry

    def doubt(self) -> None:
        """Another server may be there by now: look before reading on."""
        self._sure = False

    def _cursors(self) -> dict[int, str]:
        return {group: START if last is None else last.entry_id for group, last in self._last.items()}

    async def _look_back(self) -> None:
        """Forget those entries that are not there any more."""
        for group in await lost(self._bus, [last for last in self._last.values() if last is not None]):
            self._last[group] = None


async def lost(bus: Tape, entries: Sequence[TapeEntry]) -> set[int]:
    """Groups of those entries, one a group, that are not there any more.

    Raises:
        BusError: as the bus.
    """
    first: dict[int, TapeEntry] = {}
    before = {one.group: just_before(one.entry_id) for one in entries}
    for found in await bus.read_tape(before, limit=1) if before else ():
        first.setdefault(found.group, found)
    return {one.group for one in entries if first.get(one.group) != one}


def just_before(at: str) -> str:
    """The greatest id below that of an entry."""
    ms, number = entry_id(at)
    return f"{ms}-{number - 1}" if number else f"{ms - 1}-{_GREATEST}"
