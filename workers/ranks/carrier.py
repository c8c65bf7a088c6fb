"""Rank 0's way to what all ranks carry: it says what is to be uploaded and pulled, the servers do it. asyncio."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from diloco.pipeline.messages.head import Head, MergedBase
from diloco.pipeline.messages.tape import Contribution
from diloco.pipeline.payload import codec
from diloco.workers.exchange.member import Member
from diloco.workers.ranks.shares import server_of
from diloco.workers.ranks.wires import Wires
from diloco.workers.rounds import Publication

SAID = "attempt", "serial", "steps", "tokens", "due", "renews"
"""Of a publication; its base is the server's own."""


class RanksCarrier:
    """An `exchange.carrier.Carrier`: what the training side adopts is the number of a global that all ranks have.

    A snapshot goes by its tag: the step in which it was taken; one that is taken while training waits has a negative
    one of its own.
    """

    def __init__(self, wires: Wires, member: Member, serving: set[int]) -> None:
        """serving: servers with a snapshot that is not uploaded (`UnderWay`)."""
        self._wires, self._serving = wires, serving
        self._me = member.learner, member.incarnation
        self.lanes = wires.ranks
        self.feedback = self
        self._pulled: dict[int, int] = {}
        """Fragment -> number of the global that all ranks have."""
        self._numbers, self._tags = itertools.count(1), itertools.count(-1, -1)

    def _server(self, p: int) -> int:
        return server_of(p, self._wires.ranks)

    async def pull(self, head: Head) -> Any | None:
        """As `Carrier`; the number."""
        p, number = head.fragment, next(self._numbers)
        if not await self._wires.ask(self._server(p), "pull", p, number, codec.encode(head)):
            return None
        self._pulled[p] = number
        return number

    async def upload(self, publication: Publication, values: int | None, of_use: Callable[[], bool]) -> bool:
        """As `Carrier`; values: the snapshot's tag; None: one is to be taken now, while training waits."""
        p = publication.base.fragment
        said = {name: getattr(publication, name) for name in SAID}
        server = self._server(p)
        try:
            if not of_use():
                if values is not None:
                    self._wires.tell(server, "forget", p, values)
                return False
            tag = await self._snapshot(p) if values is None else values
            return bool(await self._wires.ask(server, "upload", p, tag, said))
        finally:
            self._serving.discard(server)

    def forget(self, p: int, tag: int) -> None:
        """A snapshot is not published."""
        self._wires.tell(self._server(p), "forget", p, tag)
        self._serving.discard(self._server(p))

    async def upload_initial(self, fragment: int, nonce: str) -> int:
        """As `Carrier`."""
        tag = 0 if fragment in self._pulled else await self._snapshot(fragment)
        return int(await self._wires.ask(self._server(fragment), "initial", fragment, tag, nonce))

    async def _snapshot(self, p: int) -> int:
        tag = next(self._tags)
        await asyncio.gather(*(self._wires.ask(rank, "snapshot", p, tag) for rank in range(self._wires.ranks)))
        return tag

    # --- feedback -----------------------------------------------------------------------------------------

    def merged(self, fragment: int, parts: Iterable[Contribution | MergedBase]) -> None:
        """As `ErrorFeedback`."""
        own = [(one.base_version, one.tokens) for one in parts if (one.learner, one.incarnation) == self._me]
        if own:
            self._wires.tell(self._server(fragment), "merged", fragment, own)

    def passed(self, fragment: int, version: int) -> None:
        """As `ErrorFeedback`."""
        self._wires.tell(self._server(fragment), "passed", fragment, version)

    def reset(self, fragment: int) -> None:
        """As `ErrorFeedback`."""
        self._wires.tell(self._server(fragment), "reset", fragment)
