"""Chooses the rank that serves each fragment. Pure.

A fragment's server gathers, encodes, uploads and pulls it, and keeps its base and its error-feedback residual.

At first the fragments are dealt out, the largest first, each to the rank that has the fewest elements. With eight equal
fragments over three ranks that gives 3, 3 and 2, and two ranks would carry an eighth more than their share. So a
fragment may move to another rank with each new global: it moves to the rank that has carried the least so far among
those with room, provided that its present server is ahead of that rank by more than the fragment's size. A rank has
room for as many fragments of the largest size as the fullest rank has at first. Where no rank has room, as with eight
fragments over two or four ranks, all fragments stay.
"""

from collections.abc import Sequence


class Turns:
    """The servers of one learner's fragments. Rank 0 keeps this record."""

    def __init__(self, elements: Sequence[int], ranks: int) -> None:
        """elements: number of elements of each fragment."""
        self._elements, self._carried = elements, [0] * ranks
        self._load = [0] * ranks
        self.servers = [0] * len(elements)
        """The rank that has the newest global of each fragment, by fragment."""
        for p in sorted(range(len(elements)), key=lambda p: (-elements[p], p)):
            self.servers[p] = min(range(ranks), key=lambda rank: (self._load[rank], rank))
            self._load[self.servers[p]] += elements[p]
        self._room = max(*self._load, -(-len(elements) // ranks) * max(elements))

    def choose(self, p: int) -> int:
        """Return the rank that is to have the fragment's next global."""
        size, now = self._elements[p], self.servers[p]
        fit = [rank for rank, load in enumerate(self._load) if rank == now or load + size <= self._room]
        least = min(fit, key=lambda rank: (self._carried[rank], rank))
        return least if self._carried[now] - self._carried[least] > size else now

    def carried(self, p: int, rank: int) -> None:
        """Record that the rank now has the fragment's newest global."""
        self._load[self.servers[p]] -= self._elements[p]
        self._load[rank] += self._elements[p]
        self._carried[rank] += self._elements[p]
        self.servers[p] = rank
