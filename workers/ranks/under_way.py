"""What is under way with which fragment, for the two threads of rank 0 that decide."""

import threading
from collections.abc import Iterable, Mapping, Sequence

SMALL = 2**22
"""Elements. Of fragments that are smaller a server has several under way: it carries more of them in a step."""


class Room:
    """Of a server, for what is under way beside what it keeps: one fragment, or some small ones. Pure."""

    def __init__(self, elements: Sequence[int]) -> None:
        """elements: of each fragment."""
        self._elements = elements

    def has(self, server: int, p: int, servers: Mapping[int, int]) -> bool:
        """Whether it has some for a fragment. servers: by fragment, of what is under way."""
        others = [self._elements[q] for q, one in servers.items() if one == server]
        return not others or sum(others) + self._elements[p] <= SMALL


class UnderWay:
    """What rank 0 has decided and not counted yet, whose uploads are under way, and what goes to another server.

    With a fragment one thing is done at a time. Of the fragments of one server so many snapshots are under way as it
    has room for. A fragment does not go to another server between the decision to snapshot it and the end of that
    upload, and none is snapshot while it goes: so a residual is fed by one server, and what becomes of a delta is told
    to the one that has made it. The training thread decides on adoptions, the exchange thread moves, both want
    snapshots.
    """

    def __init__(self, room: Room) -> None:
        self._room, self._lock = room, threading.Lock()
        self._fragments: set[int] = set()
        self._serving: dict[int, int] = {}
        """Fragment that is snapshot and not uploaded -> its server."""
        self._moving: set[int] = set()

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
            snapshots, busy = set[int](), self._serving.keys() | self._fragments | self._moving
            for p in due:
                if p not in busy and self._room.has(servers[p], p, self._serving):
                    snapshots.add(p)
                    self._serving[p] = servers[p]
            self._fragments |= snapshots
            return frozenset(snapshots)

    def counted(self, fragments: Iterable[int]) -> None:
        """What was decided of these is done and counted."""
        with self._lock:
            self._fragments.difference_update(fragments)

    def uploaded(self, p: int) -> None:
        """Its snapshot is, or will not be."""
        with self._lock:
            self._serving.pop(p, None)

    def move(self, p: int) -> bool:
        """Whether the fragment may go to another server; if so it goes, until it has `moved`."""
        with self._lock:
            free = p not in self._serving
            if free:
                self._moving.add(p)
            return free

    def moved(self, p: int) -> None:
        """All ranks have adopted it from its new server, or it stays with the one before."""
        with self._lock:
            self._moving.discard(p)
