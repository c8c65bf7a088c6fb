"""Rank 0's way to what all ranks carry: it says what is to be uploaded and pulled, the servers do it. asyncio."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from diloco.pipeline.messages.head import Head, MergedBase
from diloco.pipeline.messages.tape import Contribution
from diloco.pipeline.payload import codec
from diloco.workers.exchange.member import Member
from diloco.workers.ranks.turns import Turns
from diloco.workers.ranks.wires import Wires
from diloco.workers.rounds import Publication

SAID = "attempt", "serial", "steps", "tokens", "due", "renews"
"""Of a publication; its base is the server's own."""
Taken = tuple[int | None, int]
"""A snapshot: its tag, the step in which it was taken, and its server. None: it is to be taken now, while training
waits."""


class RanksCarrier:
    """An `exchange.carrier.Carrier`: what the training side adopts is the number of a global that all ranks have.

    A server has one fragment at a time that is pulled and not adopted, and one that is snapshot and not uploaded: so it
    needs room for one. Snapshots that are taken while training waits have tags of their own, negative ones.
    """

    def __init__(self, wires: Wires, member: Member, serving: set[int]) -> None:
        """serving: servers with a snapshot that is not uploaded (`UnderWay`)."""
        self._wires, self._serving = wires, serving
        self._me = member.learner, member.incarnation
        sizes = [fragment.elements for fragment in member.layout.fragments]
        self._turns = Turns(sizes, wires.ranks)
        self.lanes = len(sizes)
        self.feedback = self
        self.joining = True
        """Nobody trains yet: what is pulled is adopted at once."""
        self._pulled = set[int]()
        self._not_adopted: dict[int, int] = {}
        """Fragment -> server of a global that is pulled, or being pulled."""
        self._adopted = asyncio.Condition()
        self._numbers, self._tags = itertools.count(1), itertools.count(-1, -1)

    async def pull(self, head: Head) -> Any | None:
        """As `Carrier`; the number."""
        p, number, at_once = head.fragment, next(self._numbers), self.joining
        server = await self._take_turn(p)
        done = False
        try:
            done = await self._handed(p, server)
            server = server if done else self._turns.servers[p]
            done = await self._wires.ask(server, "pull", p, number, at_once, codec.encode(head))
        finally:
            if at_once or not done:
                await self._free(p)
        if not done:
            if server != self._turns.servers[p]:
                self._wires.tell(server, "drop", p)
            return None
        self._pulled.add(p)
        self._turns.carried(p, server)
        return number

    async def _take_turn(self, p: int) -> int:
        """The fragment's next server, once it has room."""
        async with self._adopted:
            while p in self._not_adopted or (server := self._turns.choose(p, self._not_adopted.values())) is None:
                await self._adopted.wait()
            self._not_adopted[p] = server
            return server

    async def _free(self, p: int) -> None:
        async with self._adopted:
            self._not_adopted.pop(p, None)
            self._adopted.notify_all()

    async def _handed(self, p: int, server: int) -> bool:
        """Whether that server can go on with the fragment."""
        now = self._turns.servers[p]
        return server == now or p not in self._pulled or bool(await self._wires.ask(now, "hand", p, server))

    def adopted(self, p: int) -> None:
        """All ranks have, at this step."""
        self._wires.go_on(self._free(p))

    async def upload(self, publication: Publication, values: Taken, of_use: Callable[[], bool]) -> bool:
        """As `Carrier`."""
        p, (tag, server) = publication.base.fragment, values
        said = {name: getattr(publication, name) for name in SAID}
        try:
            if not of_use():
                if tag is not None:
                    self._wires.tell(server, "forget", p, tag)
                return False
            tag = await self._snapshot(p, server) if tag is None else tag
            return bool(await self._wires.ask(server, "upload", p, tag, said))
        finally:
            self._serving.discard(server)

    def forget(self, p: int, values: Taken) -> None:
        """A snapshot is not published."""
        tag, server = values
        self._wires.tell(server, "forget", p, tag)
        self._serving.discard(server)

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
