"""The tape wakes a learner, the heads decide; after any gap, all heads are read again. asyncio."""

from diloco.pipeline.messages.tape import Committed, TapeRecord, WindowChanged
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.publishing import Publishing
from diloco.workers.exchange.pulling import Pulling
from diloco.workers.exchange.version_0 import Version0
from diloco.workers.feedback import ErrorFeedback

TAPE_BLOCK_S = 1.0
LOOK_AT_ALL_S = 5.0
"""Time between two looks at all heads, whatever the tape says."""
LOST_HEADS_S = 15.0
"""Heads that are gone for so long are not put back by a syncer: learners begin again with what they have adopted."""


class Following:
    """How one learner comes to know that heads have moved or gone."""

    def __init__(
        self, member: Member, pulling: Pulling, publishing: Publishing, version_0: Version0, feedback: ErrorFeedback
    ) -> None:
        self._member, self._shared = member, member.shared
        self._pulling, self._publishing = pulling, publishing
        self._version_0, self._feedback = version_0, feedback
        self._look_at_all_s = 0.0
        self._lost_since_s: float | None = None
        """Since when heads are missing that were there."""

    async def follow(self) -> None:
        """Read the tape until a call of the bus has failed: what it said meanwhile is passed over then.

        Raises:
            BusError: call it again.
        """
        outages, bus = self._member.outages, self._member.bus
        gap, outages.gap = outages.gap, False
        cursors = await bus.tape_end()
        self._look_at_all_s = 0.0
        if gap:
            self._shared.republish = True  # what the bus acknowledged before may be lost with its last second
        while not outages.gap:
            if self._member.clock.now() >= self._look_at_all_s:
                await self._look_at_all()
            entries = await bus.read_tape(cursors, TAPE_BLOCK_S)
            cursors |= {entry.group: entry.entry_id for entry in entries}
            for record in (entry.record for entry in entries):
                if isinstance(record, Committed):
                    # One that was put back: what was offered on it may be lost with its head.
                    if record.base_digest is None:
                        self._shared.republish = True
                    self._feedback.merged(record.fragment, record.contributions)
                    self._feedback.passed(record.fragment, record.version)
            told = {entry.record.fragment for entry in entries if not self._knows(entry.record)}
            if told:
                await self._pulling.look(sorted(told))

    def _knows(self, record: TapeRecord) -> bool:
        """Whether a record is of no news here: a first attempt on a base that this learner has published on.

        It asks for nothing that was not given, and the next record of the fragment is looked at anyway.
        """
        if not isinstance(record, WindowChanged) or record.attempt > 0:
            return False
        return self._publishing.newest.get(record.fragment, (-1, 0))[0] == record.version

    async def _look_at_all(self) -> None:
        """See what all heads say. Should some be gone for long, the run begins again with what was adopted of them."""
        member, pulling = self._member, self._pulling
        now, lost = member.clock.now(), self._lost_since_s
        self._look_at_all_s = now + LOOK_AT_ALL_S
        if await pulling.look(range(len(member.layout.fragments))):
            if lost is not None:
                member.log.info("heads_found", after_s=round(now - lost, 1))
                self._lost_since_s, self._shared.republish = None, True
            return
        self._look_at_all_s = now + TAPE_BLOCK_S
        if lost is None:
            self._lost_since_s = now
            detail = f"a syncer puts them back, or this learner uploads what it has adopted in {LOST_HEADS_S:g} s"
            member.log.warning("heads_lost", detail=detail)
        elif now - lost >= LOST_HEADS_S:
            nonce = f"{pulling.looks:04x}{member.incarnation}"[:32]  # a fresh one: other values than at first
            await self._version_0.ensure(nonce, pulling.values, trained=True)
            self._look_at_all_s = now
