"""Rank 0's carrier: it decides what is uploaded and pulled, and the servers do it. asyncio."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from diloco.pipeline.messages.head import Head, MergedBase
from diloco.pipeline.messages.tape import Contribution
from diloco.pipeline.payload import codec
from diloco.workers.exchange.member import Member
from diloco.workers.ranks.inflight import Room, UnderWay
from diloco.workers.ranks.placement import Turns
from diloco.workers.ranks.wires import Wires
from diloco.workers.rounds import Publication

# Fields of a publication that travel to the server. The base does not: the server has its own.
SAID = "attempt", "serial", "steps", "tokens", "due", "renews"
# A snapshot: its tag, which is the number of the step at which it was taken, and its server. Tag None: the snapshot is
# to be taken now, while training waits.
Taken = tuple[int | None, int]


class RanksCarrier:
    """An `exchange.carrier.Carrier` over all ranks. What training adopts is the number of a global that all ranks have.

    A server has at most one fragment that is pulled and not adopted, and at most one that is snapshotted and not
    uploaded; each may be several small ones instead (`inflight.Room`). Snapshots taken while training waits have
    negative tags, so that they cannot collide with step numbers.
    """

    def __init__(self, wires: Wires, member: Member, under_way: UnderWay) -> None:
        self._wires, self._under_way = wires, under_way
        self._me, self._outages = (member.learner, member.incarnation), member.outages
        sizes = [fragment.elements for fragment in member.layout.fragments]
        self._turns, self._room = Turns(sizes, wires.ranks), Room(sizes)
        self.lanes = len(sizes)
        self.feedback = self
        self.joining = True
        """True until training begins: what is pulled is then adopted at once."""
        self._pulled: dict[int, int] = {}
        """Maps a fragment to the number of its newest global; 0 if that was adopted at once."""
        self._before: dict[int, int] = {}
        """Maps a fragment of which a global is pulled or being pulled to the server that it had until then."""
        self._adopted, self._uploaded = asyncio.Condition(), asyncio.Event()
        self._numbers, self._tags = itertools.count(1), itertools.count(-1, -1)

    async def pull(self, choose: Callable[[], Head]) -> Any | None:
        """Pull a fragment to all ranks; implements `Carrier.pull` and returns the number of the global.

        Failed attempts are retried, so no bus error is raised.
        """
        p, number, at_once = choose().fragment, next(self._numbers), self.joining
        pulling = self._wires.go_on(self._pull(p, choose, number, at_once))
        try:
            server = await asyncio.shield(pulling)
        except asyncio.CancelledError:
            # The server goes on with the pull. Its room must be freed when that ends, or it would stay taken for ever.
            self._wires.go_on(self._give_up(p, pulling))
            raise
        if server is None:
            return None
        self._pulled[p] = 0 if at_once else number
        self._turns.carried(p, server)
        if at_once:
            await self._free(p)
        return number

    async def _pull(self, p: int, choose: Callable[[], Head], number: int, at_once: bool) -> int | None:
        """Return the server from which all ranks now have the global; None if a newer global replaced it meanwhile."""

        async def pull() -> bool:
            return bool(await self._wires.ask(server, "pull", p, number, at_once, codec.encode(choose())))

        server = await self._take_turn(p, moves=True)
        if not await self._handed(p, server):
            await self._free(p)
            server = await self._take_turn(p, moves=False)
        if await self._outages.retry(pull):
            return server
        await self._free(p)
        return None

    async def _give_up(self, p: int, pulling: "asyncio.Task[int | None]") -> None:
        """Free the room of a pulled global that nobody will adopt; the fragment stays with its server."""
        if await pulling is not None:
            await self._free(p)

    async def _take_turn(self, p: int, *, moves: bool) -> int:
        """Wait until the fragment's next server has room, take the room, and return the server."""
        async with self._adopted:
            while p in self._room.taken or not self._room.take(p, server := self._choose(p, moves)):
                await self._adopted.wait()
            self._before[p] = self._turns.servers[p]
            return server

    def _choose(self, p: int, moves: bool) -> int:
        """Return the fragment's next server. `moves`: it may be another one than now.

        A move begins only once the new server has room: no snapshot of the fragment can be taken while it moves, so an
        early start would delay its publication.
        """
        now = self._turns.servers[p]
        server = self._turns.choose(p) if moves else now
        return now if server != now and self._room.has(p, server) and not self._under_way.move(p) else server

    async def _free(self, p: int) -> None:
        """Free the fragment's room: it is adopted, or will not be. A server that lost the fragment drops its data."""
        for server in {self._before[p], self._room.taken[p]} - {self._turns.servers[p]}:
            await self._wires.ask(server, "drop", p)
        self._under_way.moved(p)
        async with self._adopted:
            self._room.free(p)
            self._adopted.notify_all()

    async def _handed(self, p: int, server: int) -> bool:
        """Return whether `server` has all it needs to go on with the fragment."""
        now = self._turns.servers[p]
        return server == now or p not in self._pulled or bool(await self._wires.ask(now, "hand", p, server))

    def adopted(self, p: int, number: int) -> None:
        """Record that all ranks adopted this global at the present step."""
        if self._pulled[p] == number:
            self._wires.go_on(self._free(p))

    async def upload(self, publication: Publication, values: Taken, of_use: Callable[[], bool]) -> bool:
        """Let the fragment's server upload a delta; implements `Carrier.upload`."""
        p, (tag, server) = publication.base.fragment, values
        said = {name: getattr(publication, name) for name in SAID}
        try:
            while tag is None and not self._under_way.last(p, server):
                self._uploaded.clear()
                await self._uploaded.wait()
            if not of_use():
                if tag is not None:
                    self._wires.tell(server, "forget", p, tag)
                return False
            tag = await self._snapshot(p, server) if tag is None else tag
            return bool(await self._wires.ask(server, "upload", p, tag, said))
        finally:
            self._under_way.uploaded(p)
            self._uploaded.set()

    async def upload_initial(self, fragment: int, nonce: str) -> int:
        """Let the fragment's server upload version 0; implements `Carrier.upload_initial`."""
        server = self._turns.servers[fragment]
        tag = 0 if fragment in self._pulled else await self._snapshot(fragment, server)
        return int(await self._wires.ask(server, "initial", fragment, tag, nonce))

    async def _snapshot(self, p: int, server: int) -> int:
        tag = next(self._tags)
        await asyncio.gather(*(self._wires.ask(rank, "snapshot", p, tag, server) for rank in range(self._wires.ranks)))
        return tag

    # --- feedback -----------------------------------------------------------------------------------------

    def merged(self, fragment: int, parts: Iterable[Contribution | MergedBase]) -> None:
        """Forward the learner's merged deltas to the fragment's server; implements `ErrorFeedback.merged`."""
        own = [(one.base_version, one.tokens) for one in parts if (one.learner, one.incarnation) == self._me]
        if own:
            self._wires.tell(self._turns.servers[fragment], "merged", fragment, own)

    def passed(self, fragment: int, version: int) -> None:
        """Forward this to the fragment's server; implements `ErrorFeedback.passed`."""
        self._wires.tell(self._turns.servers[fragment], "passed", fragment, version)

    def reset(self, fragment: int) -> None:
        """Forward this to the fragment's server; implements `ErrorFeedback.reset`."""
        self._wires.tell(self._turns.servers[fragment], "reset", fragment)
