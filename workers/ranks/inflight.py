"""What is under way with which fragment, for the two threads of rank 0 that decide."""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile

SMALL = 2**22
"""Elements. Of fragments that are smaller a server has several under way: it carries more of them in a step."""


class Room:
    """Of each server, for what is under way beside what it keeps: one fragment, or some small ones. Pure.

    Who waits longest for a server is its next one. Else a large fragment, which needs an empty one, would wait for ever
    where small ones always overlap.
    """

    def __init__(self, elements: Sequence[int]) -> None:
        """elements: of each fragment."""
        self._elements = elements
        self.taken: dict[int, int] = {}
        """Fragment -> server that has it under way."""
        self._waiting: dict[int, int] = {}
        """The same of those that have found no room, in the order in which they asked."""

    def has(self, p: int, server: int) -> bool:
        """Whether it has some for a fragment, and nobody waits for it since before."""
        others = [self._elements[q] for q, one in self.taken.items() if one == server]
        before = takewhile(lambda q: q != p, self._waiting)
        fits = not others or sum(others) + self._elements[p] <= SMALL
        return fits and all(self._waiting[q] != server for q in before)

    def take(self, p: int, server: int) -> bool:
        """Take it for a fragment; False: the fragment waits, and is to ask again."""
        if not self.has(p, server):
            self._waiting[p] = server
            return False
        self._waiting.pop(p, None)
        self.taken[p] = server
        return True

    def free(self, p: int) -> None:
        """The fragment needs it no more, if it had some."""
        self.taken.pop(p, None)

    def in_turn(self, asking: Collection[int]) -> list[int]:
        """These fragments in the order in which they are to ask: no others wait any more."""
        self._waiting = {p: server for p, server in self._waiting.items() if p in asking}
        return [*self._waiting, *(p for p in asking if p not in self._waiting)]


class UnderWay:
    """What rank 0 has decided and not counted yet, whose uploads are under way, and what goes to another server.

    With a fragment one thing is done at a time. Of the fragments of one server so many snapshots are under way as it
    has room for, also as the learner leaves. A fragment does not go to another server between the decision to snapshot
    it and the end of that upload, and none is snapshot while it goes: so a residual is fed by one server, and what
    becomes of a delta is told to the one that has made it. The training thread decides on adoptions, the exchange
    thread moves, both want snapshots.
    """

    def __init__(self, elements: Sequence[int]) -> None:
        """elements: of each fragment."""
        self._room, self._lock = Room(elements), threading.Lock()
        """Taken from the decision to snapshot until that is uploaded."""
        self._fragments: set[int] = set()
        self._moving: set[int] = set()
        self._leaving = False

    def adopt(self, pulled: Iterable[int]) -> frozenset[int]:
        """Those to be adopted of fragments of which all ranks have a newer global."""
        with self._lock:
            adoptions = frozenset(pulled) - self._fragments
            self._fragments |= adoptions
            return adoptions

    def snapshot(self, due: Iterable[int], servers: Mapping[int, int]) -> frozenset[int]:
        """Those to be snapshot.

        due: fragments to be published, each once. servers: by fragment, of what was adopted.
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
        """What was decided of these is done and counted."""
        with self._lock:
            self._fragments.difference_update(fragments)

    def leave(self) -> None:
        """All that was decided is counted, but for snapshots that will never be taken: the ranks have left their loops.

        From now on each fragment is snapshot once more (`last`).
        """
        with self._lock:
            self._leaving = True
            for p in self._fragments:
                self._room.free(p)
            self._fragments.clear()
            self._room.in_turn([])

    def last(self, p: int, server: int) -> bool:
        """Whether a fragment is snapshot now, for the last time; else ask again once another one is uploaded."""
        with self._lock:
            return self._room.take(p, server)

    def uploaded(self, p: int) -> None:
        """Its snapshot is, or will not be."""
        with self._lock:
            self._room.free(p)

    def move(self, p: int) -> bool:
        """Whether the fragment may go to another server; if so it goes, until it has `moved`."""
        with self._lock:
            free = p not in self._room.taken
            if free:
                self._moving.add(p)
            return free

    def moved(self, p: int) -> None:
        """All ranks have adopted it from its new server, or it stays with the one before."""
        with self._lock:
            self._moving.discard(p)
