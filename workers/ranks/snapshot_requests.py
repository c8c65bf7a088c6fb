"""The snapshots that rank 0 wants of all ranks, as one rank knows them. asyncio.

Each request is called a wish. The ranks hear of a wish at different times, and each grants it at its next step. Once
all ranks have granted it at the same step, it is granted for good; a rank that granted it earlier takes another
snapshot at that step.
"""

from collections.abc import Iterable, Mapping

from diloco.workers.ranks.wires import Wires


class Wishes:
    """One rank's record of the wishes."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._made = 0
        self._newest: dict[int, int] = {}
        """Maps a fragment to the number of its newest wish. The dict is replaced, never changed: the training thread
        reads it without a lock."""
        self._granted: dict[int, int] = {}
        """Maps a fragment to the number of the newest wish that all ranks have granted."""
        wires.handle(want=self._want)

    def make(self, fragments: Iterable[int]) -> None:
        """Ask all ranks to take snapshots of the given fragments at their next step. Only rank 0 calls this."""
        self._made += 1
        for rank in range(self._wires.ranks):
            self._wires.tell(rank, "want", sorted(fragments), self._made)

    async def _want(self, _: int, fragments: list[int], wish: int) -> None:
        self._newest = self._newest | dict.fromkeys(fragments, wish)

    @property
    def heard(self) -> Mapping[int, int]:
        """The newest wish of each fragment, granted or not, for the training thread."""
        return self._newest

    def open(self, heard: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return the (fragment, wish) pairs among `heard` that are not granted yet."""
        return [(p, wish) for p, wish in sorted(heard.items()) if self._granted.get(p, 0) < wish]

    def granted(self, p: int, wish: int) -> None:
        """Record that all ranks granted a wish at one step. The thread that counts the step calls this."""
        self._granted[p] = wish
