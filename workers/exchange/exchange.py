"""All network work of a joined learner: follow heads, publish deltas, report, claim shards.

These are coroutines over the bus, without torch: `learner` runs them in a thread of their own, tests and simulations in
virtual time. The training side never waits for anything here. The two sides meet in `Shared`, whose fields have one
writer each, in `publishing.queue` and in `reporting.soon`. Outages of the bus are waited out. `joining` makes a
learner's one `Exchange`.
"""

import asyncio
from contextlib import suppress
from typing import Generic, TypeVar

from diloco.pipeline.errors import BusError
from diloco.pipeline.messages.run import Event
from diloco.workers.exchange.carrier import Carrier
from diloco.workers.exchange.first_version import Version0
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.publishing import Publishing
from diloco.workers.exchange.pulling import Following, Pulling
from diloco.workers.exchange.reporting import Reporting
from diloco.workers.exchange.spec_check import Agreement
from diloco.workers.exchange.work_queue import ShardClaims
from diloco.workers.times import TIMES

S = TypeVar("S")


class Exchange(Generic[S]):
    """The work of one learner in its run, from having joined to leaving. S: its form of a fragment's snapshot."""

    def __init__(
        self,
        member: Member,
        agreement: Agreement,
        version_0: Version0,
        carrier: Carrier[S],
        pulling: Pulling,
        reporting: Reporting,
        claims: ShardClaims,
    ) -> None:
        """pulling: has pulled every fragment already."""
        self.member, self.shared = member, member.shared
        self._agreement = agreement
        self.carrier, self.feedback = carrier, carrier.feedback
        self.claims, self.reporting, self.pulling = claims, reporting, pulling
        self.publishing = Publishing(member, reporting, pulling.latest, carrier)
        self.following = Following(member, pulling, self.publishing.newest, version_0, carrier.feedback)

    async def work(self) -> None:
        """Do all of this work until cancelled. It ends early only if the learner has to end, or by a bug.

        Raises:
            LearnerReplaced, SpecMismatch: within an exception group.
        """
        works = (
            self.following.follow,
            self.pulling.pull_wanted,
            self.publishing.offer,
            self.publishing.upload,
            self.reporting.keep_reporting,
            self.claims.keep_claimed,
            self._agreement.keep_agreed,
            self._warn_without_syncers,
        )
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(self.member.outages.forever(work))

    async def leave(self, deadline_s: float) -> bool:
        """Flush what is queued, give back unread shards, say goodbye; return True if all of it was in time."""
        member, flushed = self.member, True
        self.claims.leave()
        try:
            async with asyncio.timeout(deadline_s):
                await self.publishing.all_sent.wait()
                await self.claims.returned.wait()
        except TimeoutError:
            flushed = False
        self.reporting.left = flushed  # set on the object: a concurrent periodic report must not take `left` back
        with suppress(TimeoutError, BusError):
            async with asyncio.timeout(max(TIMES.goodbye_s, deadline_s / 4)):
                await self.reporting.write()
                unix_s = member.clock.unix()
                left = Event(name="learner_left", who=member.learner, detail=member.incarnation, unix_s=unix_s)
                await member.bus.add_event(left)
        member.log.info("learner_left", unsent=self.publishing.unsent)
        return flushed

    async def _warn_without_syncers(self) -> None:
        """Warn when no syncer merges what is published. Memory stays bounded (one delta a base, which expires).

        If Redis takes no writes, syncers cannot report themselves either, so a missing one means nothing then.
        """
        missed = 0
        while True:
            await asyncio.sleep(TIMES.warn_look_s)
            here = await self.member.bus.read_syncers()
            if here and missed > 1:
                self.member.log.info("syncer_found", syncers=list(here.values()))
            takes_writes = self.member.clock.now() - self.reporting.taken_s < TIMES.warn_look_s
            missed = missed + 1 if takes_writes and not here else 0
            if missed == 2:
                remedy = "start `diloco syncer` for this run; training continues, but part of it may be lost meanwhile"
                self.member.log.warning("no_syncer", detail=f"nothing is merged: {remedy}")
