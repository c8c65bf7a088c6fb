"""Rank 0's way to what all ranks carry: it says what is to be uploaded and pulled, the servers do it. asyncio."""

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

SAID = "attempt", "serial", "steps", "tokens", "due", "renews"
"""Of a publication; its base is the server's own."""
Taken = tuple[int | None, int]
"""A snapshot: its tag, the step in which it was taken, and its server. None: it is to be taken now, while training
waits."""


class RanksCarrier:
    """An `exchange.carrier.Carrier`: what the training side adopts is the number of a global that all ranks have.

    A server has one fragment at a time that is pulled and not adopted, and one that is snapshot and not uploaded, or
    some small ones (`inflight.Room`). Snapshots that are taken while training waits have negative tags.
    """

    def __init__(self, wires: Wires, member: Member, under_way: UnderWay) -> None:
        self._wires, self._under_way = wires, under_way
        self._me, self._outages = (member.learner, member.incarnation), member.outages
        sizes = [fragment.elements for fragment in member.layout.fragments]
        self._turns, self._room = Turns(sizes, wires.ranks), Room(sizes)
        self.lanes = len(sizes)
        self.feedback = self
        self.joining = True
        """Nobody trains yet: what is pulled is adopted at once."""
        self._pulled: dict[int, int] = {}
        """Fragment -> number of its newest global; 0: it was adopted at once."""
        self._before: dict[int, int] = {}
        """Fragment of which a global is pulled, or being pulled -> its server until then."""
        self._adopted, self._uploaded = asyncio.Condition(), asyncio.Event()
        self._numbers, self._tags = itertools.count(1), itertools.count(-1, -1)

    async def pull(self, choose: Callable[[], Head]) -> Any | None:
        """As `Carrier`; the number. What fails is tried again, so no error of the bus is raised."""
        p, number, at_once = choose().fragment, next(self._numbers), self.joining
        pulling = self._wires.go_on(self._pull(p, choose, number, at_once))
        try:
            server = await asyncio.shield(pulling)
        except asyncio.CancelledError:  # its server goes on with it
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
        """The server that has it now, and all ranks from it."""

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
        """Of what nobody takes: it stays with its server."""
        if await pulling is not None:
            await self._free(p)

    async def _take_turn(self, p: int, *, moves: bool) -> int:
        """The fragment's next server, once it has room."""
        async with self._adopted:
            while p in self._room.taken or not self._room.take(p, server := self._choose(p, moves)):
                await self._adopted.wait()
            self._before[p] = self._turns.servers[p]
            return server

    def _choose(self, p: int, moves: bool) -> int:
        """A fragment begins to go only where there is room for it: while it goes it is not snapshot."""
        now = self._turns.servers[p]
        server = self._turns.choose(p) if moves else now
        return now if server != now and self._room.has(p, server) and not self._under_way.move(p) else server

    async def _free(self, p: int) -> None:
        """It is adopted, or will not be. Where it has changed its server, the one that has it no more forgets it."""
        for server in {self._before[p], self._room.taken[p]} - {self._turns.servers[p]}:
            await self._wires.ask(server, "drop", p)
        self._under_way.moved(p)
        async with self._adopted:
            self._room.free(p)
            self._adopted.notify_all()

    async def _handed(self, p: int, server: int) -> bool:
        """Whether that server can go on with the fragment."""
        now = self._turns.servers[p]
        return server == now or p not in self._pulled or bool(await self._wires.ask(now, "hand", p, server))

    def adopted(self, p: int, number: int) -> None:
        """All ranks have, at this step."""
        if self._pulled[p] == number:
            self._wires.go_on(self._free(p))

    async def upload(self, publication: Publication, values: Taken, of_use: Callable[[], bool]) -> bool:
        """As `Carrier`."""
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
        """As `Carrier`."""
        server = self._turns.servers[fragment]
        tag = 0 if fragment in self._pulled else await self._snapshot(fragment, server)
        return int(await self._wires.ask(server, "initial", fragment, tag, nonce))

    async def _snapshot(self, p: int, server: int) -> int:
        tag = next(self._tags)
        await asyncio.gather(*(self._wires.ask(rank, "snapshot", p, tag, server) for rank in range(self._wires.ranks)))
        return tag

    # --- feedback -----------------------------------------------------------------------------------------

    def merged(self, fragment: int, parts: Iterable[Contribution | MergedBase]) -> None:
        """As `ErrorFeedback`."""
        own = [(one.base_version, one.tokens) for one in parts if (one.learner, one.incarnation) == self._me]
        if own:
            self._wires.tell(self._turns.servers[fragment], "merged", fragment, own)

    def passed(self, fragment: int, version: int) -> None:
        """As `ErrorFeedback`."""
        self._wires.tell(self._turns.servers[fragment], "passed", fragment, version)

    def reset(self, fragment: int) -> None:
        """As `ErrorFeedback`."""
        self._wires.tell(self._turns.servers[fragment], "reset", fragment)
