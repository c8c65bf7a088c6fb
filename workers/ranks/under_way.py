"""What is under way with which fragment, for the two threads of rank 0 that decide."""

import threading
from collections.abc import Iterable, Mapping


class UnderWay:
    """What rank 0 has decided and not counted yet, whose uploads are under way, and what goes to another server.

    With a fragment one thing is done at a time. Of the fragments of one server one snapshot is under way at a time, so
    that a server has the room of one fragment. A fragment does not go to another server between the decision to
    snapshot it and the end of that upload, and none is snapshot while it goes: so a residual is fed by one server, and
    what becomes of a delta is told to the one that has made it. The training thread decides on adoptions, the exchange
    thread moves, both want snapshots.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fragments: set[int] = set()
        self._serving: dict[int, int] = {}
        """Server -> its fragment that is snapshot and not uploaded."""
        self._moving: set[int] = set()

    def adopt(self, pulled: Iterable[int]) -> frozenset[int]:
        """Those to be adopted of fragments of which all ranks have a newer global."""
        with self._lock:
            adoptions = frozenset(pulled) - self._fragments
            self._fragments |= adoptions
            return adoptions

    def snapshot(self, due: Iterable[int], servers: Mapping[int, int]) -> frozenset[int]:
        """Those to be snapshot of fragments to be published. servers: by fragment, of what was adopted."""
        with self._lock:
            snapshots = set[int]()
            for p in due:
                if p not in self._fragments | snapshots | self._moving and servers[p] not in self._serving:
                    snapshots.add(p)
                    self._serving[servers[p]] = p
            self._fragments |= snapshots
            return frozenset(snapshots)

    def counted(self, fragments: Iterable[int]) -> None:
        """What was decided of these is done and counted."""
        with self._lock:
            self._fragments.difference_update(fragments)

    def uploaded(self, server: int) -> None:
        """Its snapshot is, or will not be."""
        with self._lock:
            self._serving.pop(server, None)

    def move(self, p: int) -> bool:
        """Whether the fragment may go to another server; if so it goes, until it has `moved`."""
        with self._lock:
            free = p not in self._serving.values()
            if free:
                self._moving.add(p)
            return free

    def moved(self, p: int) -> None:
        """All ranks have adopted it from its new server, or it stays with the one before."""
        with self._lock:
            self._moving.discard(p)
