"""Rank 0's direction of all ranks: which snapshots it wants, and what the servers upload and pull. Runs on asyncio."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from diloco.pipeline.messages.fragment import Contribution, Head, MergedBase
from diloco.pipeline.payload import codec
from diloco.workers.exchange.member import Member
from diloco.workers.ranks.placement import Capacity
from diloco.workers.ranks.transport import Transport
from diloco.workers.rounds import Publication

# Fields of a publication that travel to the server. The base does not: the server has its own.
PUBLICATION_FIELDS = "attempt", "serial", "steps", "tokens", "due", "renews"
# A snapshot's tag, which is the number of the step at which it was taken; None: it is to be taken now, while training
# waits.
SnapshotAt = int | None


class SnapshotRequests:
    """The snapshots that rank 0 wants of all ranks, as one rank knows them.

    The ranks hear of a request at different times, and each takes the snapshot at its next step. Once all ranks have
    taken it at the same step, the request is granted; a rank that took it earlier takes another one at that step.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._made = 0
        self._newest: dict[int, int] = {}
        """Maps a fragment to the number of its newest request. The dict is replaced, never changed: the training thread
        reads it without a lock."""
        self._granted: dict[int, int] = {}
        """Maps a fragment to the number of the newest request that all ranks have granted."""
        transport.handle(want=self._take_requests)

    def make(self, fragments: Iterable[int]) -> None:
        """Ask all ranks to take snapshots of the given fragments at their next step. Only rank 0 calls this."""
        self._made += 1
        for rank in range(self._transport.ranks):
            self._transport.notify(rank, "want", sorted(fragments), self._made)

    async def _take_requests(self, _: int, fragments: list[int], request: int) -> None:
        self._newest = self._newest | dict.fromkeys(fragments, request)

    @property
    def newest(self) -> Mapping[int, int]:
        """The newest request of each fragment, granted or not, for the training thread."""
        return self._newest

    def ungranted(self, newest: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return the (fragment, request) pairs among `newest` that are not granted yet."""
        return [(p, request) for p, request in sorted(newest.items()) if self._granted.get(p, 0) < request]

    def granted(self, p: int, request: int) -> None:
        """Record that all ranks granted a request at one step. The thread that counts the step calls this."""
        self._granted[p] = request


class InFlight:
    """Rank 0's record of decisions that are not counted yet, and of uploads in flight.

    At any time at most one thing happens to a fragment. A server has as many snapshots in flight as fit into its
    memory, even while the learner leaves.

    The training thread decides on adoptions, and both threads request snapshots: hence the lock.
    """

    def __init__(self, elements: Sequence[int], servers: Sequence[int]) -> None:
        """elements, servers: number of elements and server of each fragment."""
        self._room, self._lock = Capacity(elements, servers), threading.Lock()
        """The memory is reserved from the decision to take a snapshot until the snapshot is uploaded."""
        self._fragments: set[int] = set()
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

    def snapshot(self, due: Iterable[int]) -> frozenset[int]:
        """Return the fragments to snapshot now. due: fragments to be published, each once."""
        with self._lock:
            if self._leaving:
                return frozenset()
            busy = self._room.taken | self._fragments
            asking = self._room.in_turn([p for p in due if p not in busy])
            snapshots = frozenset([p for p in asking if self._room.take(p)])
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

    def last(self, p: int) -> bool:
        """Return whether the last snapshot of a fragment may be taken now; if not, ask again after another upload."""
        with self._lock:
            return self._room.take(p)

    def uploaded(self, p: int) -> None:
        """Record that the fragment's snapshot is uploaded, or never will be."""
        with self._lock:
            self._room.free(p)


class RanksCarrier:
    """An `exchange.carrier.Carrier` over all ranks. What training adopts is the number of a global that all ranks have.

    A server has at most one fragment that is pulled and not adopted, and at most one that is snapshotted and not
    uploaded; each may be several small ones instead (`placement.Capacity`). Snapshots taken while training waits have
    negative tags, so that they cannot collide with step numbers.
    """

    def __init__(self, transport: Transport, member: Member, in_flight: InFlight, servers: Sequence[int]) -> None:
        """servers: the server of each fragment."""
        self._transport, self._in_flight, self._servers = transport, in_flight, servers
        self._me, self._outages = (member.learner, member.incarnation), member.outages
        sizes = [fragment.elements for fragment in member.layout.fragments]
        self._room = Capacity(sizes, servers)
        self.lanes = len(sizes)
        self.feedback = self
        self.joining = True
        """True until training begins: what is pulled is then adopted at once."""
        self._pulled: dict[int, int] = {}
        """Maps a fragment to the number of its newest global; 0 if that was adopted at once."""
        self._adopted, self._uploaded = asyncio.Condition(), asyncio.Event()
        self._numbers, self._tags = itertools.count(1), itertools.count(-1, -1)

    async def pull(self, choose: Callable[[], Head]) -> Any | None:
        """Pull a fragment to all ranks; implements `Carrier.pull` and returns the number of the global.

        Failed attempts are retried, so no bus error is raised.
        """
        p, number, at_once = choose().fragment, next(self._numbers), self.joining
        pulling = self._transport.start_task(self._pull(p, choose, number, at_once))
        try:
            pulled = await asyncio.shield(pulling)
        except asyncio.CancelledError:
            # The server continues with the pull. Its memory must be released when that ends, or it would stay reserved
            # forever.
            self._transport.start_task(self._give_up(p, pulling))
            raise
        if not pulled:
            return None
        self._pulled[p] = 0 if at_once else number
        if at_once:
            await self._free_room(p)
        return number

    async def _pull(self, p: int, choose: Callable[[], Head], number: int, at_once: bool) -> bool:
        """Return whether all ranks now have the global; False if a newer one replaced it meanwhile."""

        async def pull() -> bool:
            return bool(await self._transport.ask(self._servers[p], "pull", p, number, at_once, codec.encode(choose())))

        async with self._adopted:
            await self._adopted.wait_for(lambda: p not in self._room.taken and self._room.take(p))
        if await self._outages.retry(pull):
            return True
        await self._free_room(p)
        return False

    async def _give_up(self, p: int, pulling: "asyncio.Task[bool]") -> None:
        """Release the memory of a pulled global that will not be adopted."""
        if await pulling:
            await self._free_room(p)

    async def _free_room(self, p: int) -> None:
        """Release the memory: the global is adopted or dropped."""
        async with self._adopted:
            self._room.free(p)
            self._adopted.notify_all()

    def adopted(self, p: int, number: int) -> None:
        """Record that all ranks adopted this global at the current step."""
        if self._pulled[p] == number:
            self._transport.start_task(self._free_room(p))

    async def upload(self, publication: Publication, values: SnapshotAt, of_use: Callable[[], bool]) -> bool:
        """Let the fragment's server upload a delta; implements `Carrier.upload`."""
        p, tag = publication.base.fragment, values
        server = self._servers[p]
        fields = {name: getattr(publication, name) for name in PUBLICATION_FIELDS}
        try:
            while tag is None and not self._in_flight.last(p):
                self._uploaded.clear()
                await self._uploaded.wait()
            if not of_use():
                if tag is not None:
                    self._transport.notify(server, "forget", p, tag)
                return False
            tag = await self._snapshot(p) if tag is None else tag
            return bool(await self._transport.ask(server, "upload", p, tag, fields))
        finally:
            self._in_flight.uploaded(p)
            self._uploaded.set()

    async def upload_initial(self, fragment: int, nonce: str) -> int:
        """Let the fragment's server upload version 0; implements `Carrier.upload_initial`."""
        tag = 0 if fragment in self._pulled else await self._snapshot(fragment)
        return int(await self._transport.ask(self._servers[fragment], "initial", fragment, tag, nonce))

    async def _snapshot(self, p: int) -> int:
        tag = next(self._tags)
        await self._transport.ask_all("snapshot", p, tag)
        return tag

    # --- feedback -----------------------------------------------------------------------------------------

    def merged(self, fragment: int, parts: Iterable[Contribution | MergedBase]) -> None:
        """Forward the learner's merged deltas to the fragment's server; implements `ErrorFeedback.merged`."""
        own = [(one.base_version, one.tokens) for one in parts if (one.learner, one.incarnation) == self._me]
        if own:
            self._transport.notify(self._servers[fragment], "merged", fragment, own)

    def passed(self, fragment: int, version: int) -> None:
        """Forward this to the fragment's server; implements `ErrorFeedback.passed`."""
        self._transport.notify(self._servers[fragment], "passed", fragment, version)

    def reset(self, fragment: int) -> None:
        """Forward this to the fragment's server; implements `ErrorFeedback.reset`."""
        self._transport.notify(self._servers[fragment], "reset", fragment)
