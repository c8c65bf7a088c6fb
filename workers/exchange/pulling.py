"""Heads and the globals that they name: looked at, pulled, handed to the training side. asyncio."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.head import Head
from diloco.pipeline.retry import Backoff, Retries
from diloco.pipeline.transfer.global_formats import FORMATS
from diloco.pipeline.transfer.globals import Held, pull_shown
from diloco.workers.exchange.member import Member
from diloco.workers.feedback import ErrorFeedback
from diloco.workers.rounds import Base, OpenWindow

Float32 = npt.NDArray[np.float32]

BACKOFF = Backoff(0.05, 2.0)
SLOW_PULL_S = 60.0
"""A payload that takes several reads is kept for so long from each one on."""


class Pulling:
    """What one learner knows of the heads, and has pulled."""

    def __init__(self, member: Member, feedback: ErrorFeedback) -> None:
        self._member, self._feedback = member, feedback
        self.latest: dict[int, tuple[int, bytes]] = {}
        """Fragment -> (version, digest) last handed to the training side."""
        self._bases: dict[int, Base] = {}
        self._wanted: dict[int, Head] = {}
        self._wake = asyncio.Event()
        self.looks = 0
        self._looked: dict[int, int] = {}
        """Fragment -> number of the look by which its head was last known."""

    def values(self, fragment: int) -> Float32:
        """(elements,) as last pulled."""
        return self._member.encoder.read(self._bases[fragment].values)

    async def look(self, fragments: Iterable[int]) -> bool:
        """See what the heads say; False if one is not there.

        Raises:
            BusError: they cannot be read.
        """
        self.looks += 1
        number, windows = self.looks, self._member.shared.windows
        heads = await self._member.bus.read_heads(list(fragments))
        for head in heads:
            if head is None or self._looked.get(head.fragment, 0) > number:
                continue  # a look that began later was answered first
            p, window = head.fragment, head.window
            self._looked[p] = number
            self._feedback.merged(p, head.merged)  # the tape told of it already, but for a gap
            if window.state in ("collecting", "grace"):
                windows[p] = OpenWindow(head.version, window.attempt, self._member.learner in window.members)
            else:
                windows.pop(p, None)
            if self.latest.get(p) != (head.version, head.digest):
                self._wanted[p] = head
                self._wake.set()
            else:
                self._wanted.pop(p, None)
        return None not in heads

    async def pull_wanted(self) -> None:
        """Pull each global that is not here yet, one after the other.

        Raises:
            BusError: call it again.
        """
        retries, clock = Retries(BACKOFF), self._member.clock
        while True:
            self._wake.clear()
            p, wait_s = retries.choose(self._wanted, clock.now())
            if p is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                continue
            head = self._wanted[p]
            pulled = await self.pull(head)
            wanted = self._wanted.get(p)
            if wanted is not None and (wanted.version, wanted.digest) == (head.version, head.digest):
                del self._wanted[p]  # also if it was looked at again meanwhile: adopting twice would cost training
            retries.tried(p, pulled, clock.now())
            if not pulled:
                await self.look([p])

    async def pull(self, head: Head) -> bool:
        """Fetch a head's global and hand it over; False if it was replaced meanwhile.

        Raises:
            BusError: it cannot be read.
        """
        member, p = self._member, head.fragment
        elements, sync, held = member.layout.fragments[p].elements, member.spec.sync, None
        if FORMATS[sync.global_codec].follows and (base := self._bases.get(p)) is not None:
            held = Held(base.version, base.digest, await member.offload(member.encoder.read, base.values))
        try:
            pulled = await pull_shown(member.bus, head, elements, sync, member.offload, SLOW_PULL_S, held)
        except BadPayload as error:
            member.log.warning("pull_failed", fragment=p, version=head.version, error=str(error))
            return False
        values = await member.apart(elements, member.encoder.keep, pulled)
        if p in self.latest and head.version <= self.latest[p][0]:
            self._feedback.reset(p)
        self.latest[p] = (head.version, head.digest)
        self._bases[p] = member.shared.adoptions[p] = Base(p, head.version, head.digest, values, head.interval)
        member.log.debug("fragment_pulled", fragment=p, version=head.version)
        return True
