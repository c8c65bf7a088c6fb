"""Which rank serves which fragment: it gathers, encodes, uploads and pulls it, and has its base and residual. Pure.

At first fragments are given out largest first, each to the rank that has least. Eight equal ones over three ranks are
3, 3 and 2: a rank would carry an eighth more than its share. So a fragment may go to another rank with each new
global: to the one that has carried least, of those that have room, if its own is ahead of that by more than the
fragment. There is room for as many of the largest as the fullest rank has at first. Where no rank has any, as with
eight over two or four, all stay.
"""

from collections.abc import Sequence


class Turns:
    """Of one learner; rank 0's."""

    def __init__(self, elements: Sequence[int], ranks: int) -> None:
        """elements: of each fragment."""
        self._elements, self._carried = elements, [0] * ranks
        self._load = [0] * ranks
        self.servers = [0] * len(elements)
        """Rank that has the newest global, by fragment."""
        for p in sorted(range(len(elements)), key=lambda p: (-elements[p], p)):
            self.servers[p] = min(range(ranks), key=lambda rank: (self._load[rank], rank))
            self._load[self.servers[p]] += elements[p]
        self._room = max(*self._load, -(-len(elements) // ranks) * max(elements))

    def choose(self, p: int) -> int:
        """The rank that is to have the fragment's next global."""
        size, now = self._elements[p], self.servers[p]
        fit = [rank for rank, load in enumerate(self._load) if rank == now or load + size <= self._room]
        least = min(fit, key=lambda rank: (self._carried[rank], rank))
        return least if self._carried[now] - self._carried[least] > size else now

    def carried(self, p: int, rank: int) -> None:
        """The rank has the fragment's newest global."""
        self._load[self.servers[p]] -= self._elements[p]
        self._load[rank] += self._elements[p]
        self._carried[rank] += self._elements[p]
        self.servers[p] = rank
