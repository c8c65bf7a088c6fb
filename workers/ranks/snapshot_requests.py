"""Snapshots that rank 0 wants of all ranks, as one of them knows of them. asyncio.

Each rank hears of a wish at its own time, and grants it at its next step. Once all have done so at the same step it is
granted for good; whoever was too early takes another snapshot then.
"""

from collections.abc import Iterable, Mapping

from diloco.workers.ranks.wires import Wires


class Wishes:
    """One rank's."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._made = 0
        self._newest: dict[int, int] = {}
        """Fragment -> number of its newest wish. Replaced whole, since the training thread reads it."""
        self._granted: dict[int, int] = {}
        """The same of those that all ranks have granted."""
        wires.handle(want=self._want)

    def make(self, fragments: Iterable[int]) -> None:
        """Rank 0's: have all ranks snapshot these at their next step."""
        self._made += 1
        for rank in range(self._wires.ranks):
            self._wires.tell(rank, "want", sorted(fragments), self._made)

    async def _want(self, _: int, fragments: list[int], wish: int) -> None:
        self._newest = self._newest | dict.fromkeys(fragments, wish)

    @property
    def heard(self) -> Mapping[int, int]:
        """Fragment -> number of its newest wish, granted or not. Of the training thread."""
        return self._newest

    def open(self, heard: Mapping[int, int]) -> list[tuple[int, int]]:
        """Those of them that were not granted yet."""
        return [(p, wish) for p, wish in sorted(heard.items()) if self._granted.get(p, 0) < wish]

    def granted(self, p: int, wish: int) -> None:
        """All ranks have, at one step. Of whoever counts it."""
        self._granted[p] = wish
