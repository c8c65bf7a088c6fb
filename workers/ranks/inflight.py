"""Work in flight for each fragment, shared by rank 0's two threads that make decisions."""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile

# Elements. A server may have several fragments in flight up to this total: with small fragments one at a time would
# leave it idle, since it can carry several in one step.
SMALL = 2**22


class Room:
    """The room that each server has for work in flight, besides what it keeps: one fragment, or several small ones.
    Pure.

    The fragment that has waited longest for a server gets it next. Otherwise a large fragment, which needs an empty
    server, would wait for ever where small ones always overlap.
    """

    def __init__(self, elements: Sequence[int]) -> None:
        """elements: number of elements of each fragment."""
        self._elements = elements
        self.taken: dict[int, int] = {}
        """Maps a fragment in flight to its server."""
        self._waiting: dict[int, int] = {}
        """Maps a fragment that found no room to the server it waits for, in the order in which they asked."""

    def has(self, p: int, server: int) -> bool:
        """Return whether the server has room for the fragment and no other fragment has waited for it longer."""
        others = [self._elements[q] for q, one in self.taken.items() if one == server]
        before = takewhile(lambda q: q != p, self._waiting)
        fits = not others or sum(others) + self._elements[p] <= SMALL
        return fits and all(self._waiting[q] != server for q in before)

    def take(self, p: int, server: int) -> bool:
        """Take the room for a fragment. Return False if there is none: the fragment then waits and must ask again."""
        if not self.has(p, server):
            self._waiting[p] = server
            return False
        self._waiting.pop(p, None)
        self.taken[p] = server
        return True

    def free(self, p: int) -> None:
        """Release the room that the fragment has, if it has any."""
        self.taken.pop(p, None)

    def in_turn(self, asking: Collection[int]) -> list[int]:
        """Return these fragments in the order in which they are to ask; all other fragments leave the line."""
        self._waiting = {p: server for p, server in self._waiting.items() if p in asking}
        return [*self._waiting, *(p for p in asking if p not in self._waiting)]


class UnderWay:
    """Rank 0's record of decisions that are not counted yet, uploads in flight, and fragments that move to another
    server.

    At any time at most one thing happens to a fragment. A server has as many snapshots in flight as it has room for,
    also while the learner leaves. A fragment does not move to another server between the decision to take a snapshot of
    it and the end of that upload, and no snapshot of it is taken while it moves. Hence one server feeds a residual, and
    the server that made a delta is the one that learns the delta's fate.

    The training thread decides on adoptions, the exchange thread moves fragments, and both request snapshots: hence the
    lock.
    """

    def __init__(self, elements: Sequence[int]) -> None:
        """elements: number of elements of each fragment."""
        self._room, self._lock = Room(elements), threading.Lock()
        """The room is taken from the decision to take a snapshot until the snapshot is uploaded."""
        self._fragments: set[int] = set()
        self._moving: set[int] = set()
        self._leaving = False

    def adopt(self, pulled: Iterable[int]) -> frozenset[int]:
        """Return the fragments to adopt now.

        Args:
            pulled: fragments of which all ranks have a newer global.
        """
        with self._lock:
            adoptions = frozenset(pulled) - self._fragments
            self._fragments |= adoptions
            return adoptions

    def snapshot(self, due: Iterable[int], servers: Mapping[int, int]) -> frozenset[int]:
        """Return the fragments of which a snapshot is to be taken now.

        Args:
            due: fragments to be published, each once.
            servers: the server of each adopted fragment.
        """
        with self._lock:
            if self._leaving:
                return frozenset()
            busy = self._room.taken.keys() | self._fragments | self._moving
            asking = self._room.in_turn([p for p in due if p not in busy])
            snapshots = frozenset([p for p in asking if self._room.take(p, servers[p])])
            self._fragments |= snapshots
            return snapshots

    def counted(self, fragments: Iterable[int]) -> None:
        """Record that the decisions about these fragments are carried out and counted."""
        with self._lock:
            self._fragments.difference_update(fragments)

    def leave(self) -> None:
        """Treat every decision as counted: the ranks left their loops, so snapshots still wanted are never taken.

        From now on one last snapshot is taken of each fragment (`last`).
        """
        with self._lock:
            self._leaving = True
            for p in self._fragments:
                self._room.free(p)
            self._fragments.clear()
            self._room.in_turn([])

    def last(self, p: int, server: int) -> bool:
        """Return whether the last snapshot of a fragment may be taken now; if not, ask again after another upload."""
        with self._lock:
            return self._room.take(p, server)

    def uploaded(self, p: int) -> None:
        """Record that the fragment's snapshot is uploaded, or never will be."""
        with self._lock:
            self._room.free(p)

    def move(self, p: int) -> bool:
        """Return whether the fragment may move to another server. If True, it counts as moving until `moved`."""
        with self._lock:
            free = p not in self._room.taken
            if free:
                self._moving.add(p)
            return free

    def moved(self, p: int) -> None:
        """Record that the move ended: all ranks adopted the fragment from its new server, or it did not move."""
        with self._lock:
            self._moving.discard(p)
