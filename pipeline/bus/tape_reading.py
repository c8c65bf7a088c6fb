"""Reading tapes on and on, also where another server takes over. asyncio.

A server that takes over may lack what its predecessor had acknowledged, and its clock may be behind. Then what comes
next has lower ids than what was read last, and whoever reads on from there never sees it. No error need tell: nothing
may have been under way at that moment. So before a reader takes what comes next, it looks whether the entry that it
read last is still there. If it is not, it reads the tape from its start: it is told some records once more, and none is
missing.
"""

from collections.abc import Sequence

from diloco.pipeline.bus.ports import START, Tape, TapeEntry
from diloco.pipeline.bus.schema import entry_id
from diloco.pipeline.errors import BusUnavailable

_GREATEST = 2**64 - 1


class TapeReader:
    """How far somebody has read the tapes of a run."""

    def __init__(self, bus: Tape, groups: int) -> None:
        self._bus = bus
        self._last: dict[int, TapeEntry | None] = dict.fromkeys(range(groups))

    async def read(self, block_s: float = 0.0) -> list[TapeEntry]:
        """What comes behind the entries that were passed; waits up to `block_s` for the first.

        Raises:
            BusError: call it again.
        """
        while True:
            found = await self._bus.read_tape(self._cursors(), block_s)
            of = {entry.group for entry in found} or self._last.keys()
            away = set[int]()
            gone = await lost(self._bus, [last for group in of if (last := self._last[group]) is not None], away)
            self._last |= dict.fromkeys(gone)
            sure = [entry for entry in found if entry.group not in gone | away]
            if sure or not gone | away:
                return sure
            if not gone:
                raise BusUnavailable(f"the servers of groups {', '.join(map(str, sorted(away)))} do not answer")

    def passed(self, entry: TapeEntry) -> None:
        """An entry is dealt with: it is read again only from a tape that lacks it."""
        self._last[entry.group] = entry

    def forget(self, group: int) -> None:
        """Read a group's tape from its start."""
        self._last[group] = None

    def _cursors(self) -> dict[int, str]:
        return {group: START if last is None else last.entry_id for group, last in self._last.items()}


async def lost(bus: Tape, entries: Sequence[TapeEntry], away: set[int]) -> set[int]:
    """Groups of those entries, one a group, that are not there any more.

    away: told the groups of which nobody can tell.

    Raises:
        BusError: as the bus.
    """
    first: dict[int, TapeEntry] = {}
    before = {one.group: just_before(one.entry_id) for one in entries}
    for found in await bus.read_tape(before, limit=1, away=away) if before else ():
        first.setdefault(found.group, found)
    return {one.group for one in entries if first.get(one.group) != one} - away


def just_before(at: str) -> str:
    """The greatest id below that of an entry."""
    ms, number = entry_id(at)
    return f"{ms}-{number - 1}" if number else f"{ms - 1}-{_GREATEST}"
