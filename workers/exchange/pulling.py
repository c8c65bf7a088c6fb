"""Heads and the globals that they name: followed, looked at, pulled, handed to the training side. asyncio.

The tape wakes a learner, the heads decide; after any gap, all heads are read again.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

from diloco.pipeline.bus.by_group import by_group
from diloco.pipeline.bus.ports import Clock
from diloco.pipeline.ema import Ema
from diloco.pipeline.errors import BadMessage
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.tape import Committed, Rejected, TapeRecord, WindowChanged
from diloco.pipeline.retry import Backoff, Retries
from diloco.workers.exchange.carrier import Carrier, Feedback, on_all_lanes
from diloco.workers.exchange.first_version import Version0
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.publishing import Publishing
from diloco.workers.exchange.refused import Refused
from diloco.workers.rounds import Base, OpenWindow
from diloco.workers.step_times import DECAY

BACKOFF = Backoff(0.05, 2.0)


class PullTimes:
    """How long one incarnation's pulls take, s: the delivery in the grace's sync time (paper, adaptive grace window).

    A pull is counted from the learner's first sight of the head to the global in its hands, all by its own clock. The
    news of the commit is under way for about as long as the commit's answer is, which the syncer has counted by then.
    So the two together are the time from the fixed set to the pulled global, and no two machines' clocks are compared.
    """

    def __init__(self, mean_elements: float) -> None:
        """mean_elements: of the layout's fragments, above 0."""
        self._mean = mean_elements
        self._elements, self._took_s = Ema(DECAY), Ema(DECAY)

    def observe(self, elements: int, seconds: float) -> None:
        """One more pull, of a fragment of so many elements."""
        self._elements.observe(elements)
        self._took_s.observe(seconds)

    @property
    def pull_s(self) -> float:
        """For a fragment of mean size; 0.0 before the first pull. A large fragment counts by its size."""
        elements, took_s = self._elements.value, self._took_s.value
        return 0.0 if elements is None or took_s is None else took_s * self._mean / elements


class Pulling:
    """What one learner knows of the heads, and has pulled."""

    def __init__(self, member: Member, carrier: Carrier) -> None:
        self._member, self._carrier = member, carrier
        self.latest: dict[int, tuple[int, bytes]] = {}
        """Fragment -> (version, digest) last handed to the training side."""
        self._wanted: dict[int, Head] = {}
        self._seen_s: dict[int, float] = {}
        """Fragment -> when its wanted head was first heard of; not known after an outage."""
        self._times = PullTimes(member.layout.elements / len(member.layout.fragments))
        self._wakes = [asyncio.Event() for _ in range(carrier.lanes)]
        self.looks = 0
        self.reached = False
        """The last look found all nodes."""
        self.part_known = True
        """The run's state was read since anything was lost of it, or put back."""
        self._told: set[str] = set()
        """What was said of heads that cannot be read, since all were last looked at."""
        self._looked: dict[int, int] = {}
        """Fragment -> number of the look by which its head was last known."""

    async def look(self, fragments: Iterable[int]) -> bool:
        """See what the heads say, of nodes that can be reached; False if one is not there. One may be unreadable.

        Raises:
            BusError: they cannot be read.
        """
        self.looks += 1
        number, windows, began = self.looks, self._member.shared.windows, self._member.clock.now()
        bus = self._member.bus
        asked = list(fragments)
        unreadable = list[BadMessage]()
        heads = list((await by_group(bus.keys, asked, bus.read_heads, unreadable.append)).values())
        self.reached = len(heads) + len(unreadable) == len(asked)
        if not self.part_known:
            # What was published in the part before is counted by its bases, so the next one is to be known before they
            # are replaced. Here and not in `_pull`, where a call that fails would lose a global that has come.
            shared = self._member.shared
            known, state = shared.state, await bus.read_state()
            same = state is not None and known is not None and state.began_unix_s == known.began_unix_s
            if same and shared.state is known:
                shared.state = state
            self.part_known = state is not None and self.reached and len(asked) == len(self._member.layout.fragments)
        self.part_known &= None not in heads
        told = {str(error) for error in unreadable}
        for error in sorted(told - self._told):
            self._member.log.warning("head_unreadable", error=error)
        self._told = told if len(asked) == len(self._member.layout.fragments) else self._told | told
        for head in heads:
            if head is None or self._looked.get(head.fragment, 0) > number:
                continue  # a look that began later was answered first
            p, window = head.fragment, head.window
            self._looked[p] = number
            self._carrier.feedback.merged(p, head.merged)  # the tape told of it already, but for a gap
            if window.state in ("collecting", "grace"):
                windows[p] = OpenWindow(head.version, window.attempt, self._member.learner in window.members)
            else:
                windows.pop(p, None)
            if self.latest.get(p) != (head.version, head.digest):
                before = self._wanted.get(p)
                if before is None or (before.version, before.digest) != (head.version, head.digest):
                    self._seen_s[p] = began
                self._wanted[p] = head
                self._wakes[p % self._carrier.lanes].set()
            else:
                self._wanted.pop(p, None)
        if windows:
            self._member.shared.window_seen()
        return None not in heads

    async def pull_wanted(self) -> None:
        """Pull each global that is not here yet, on each lane one after the other.

        Raises:
            BusError: call it again.
        """
        lanes = self._carrier.lanes
        if lanes == 1:
            await self._pull_wanted_on(0)
        else:  # the node of one lane's fragments may be away
            await on_all_lanes(lambda lane: self._member.outages.retry(self._pull_wanted_on, lane), lanes)

    async def _pull_wanted_on(self, lane: int) -> None:
        retries, clock, lanes, wake = Retries(BACKOFF), self._member.clock, self._carrier.lanes, self._wakes[lane]
        for seen in [seen for seen in self._seen_s if seen % lanes == lane]:
            del self._seen_s[seen]  # an outage is no part of a pull
        while True:
            wake.clear()
            p, wait_s = retries.choose([p for p in self._wanted if p % lanes == lane], clock.now())
            if p is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await wake.wait()
                continue
            chosen = _Chosen(self._wanted[p], self._wanted, self._seen_s, clock)
            pulled = await self._pull(chosen)
            head, seen_s = chosen.head, chosen.seen_s
            layout = self._member.layout.fragments[p]
            if pulled and seen_s is not None and not layout.averaged:  # of which a call takes longer than the bytes
                self._times.observe(layout.elements, clock.now() - seen_s - chosen.waited_s)
                self._member.shared.pull_s = self._times.pull_s
            wanted = self._wanted.get(p)
            if wanted is not None and (wanted.version, wanted.digest) == (head.version, head.digest):
                del self._wanted[p]  # also if it was looked at again meanwhile: adopting twice would cost training
            retries.tried(p, pulled, clock.now())
            if not pulled:
                await self.look([p])
                again = self._wanted.get(p)
                if seen_s is not None and again is not None and again.digest == head.digest:
                    self._seen_s[p] = seen_s  # tries that failed are part of it

    async def pull(self, head: Head) -> bool:
        """Fetch a head's global and hand it over; False if it was replaced meanwhile.

        Raises:
            BusError: it cannot be read.
        """
        return await self._pull(_Chosen(head, {}, {}, self._member.clock))

    async def _pull(self, chosen: "_Chosen") -> bool:
        values, member = await self._carrier.pull(chosen), self._member
        if values is None:
            return False
        head, p = chosen.head, chosen.head.fragment
        if p in self.latest and head.version <= self.latest[p][0]:
            self._carrier.feedback.reset(p)
        self.latest[p] = (head.version, head.digest)
        member.shared.merged_tokens[p] = head.merged_tokens
        member.shared.adoptions[p] = Base(p, head.version, head.digest, values, head.interval)
        member.log.debug("fragment_pulled", fragment=p, version=head.version)
        return True


class _Chosen:
    """Calling it gives the head that is to be pulled: of its fragment the newest that is known by then."""

    def __init__(self, head: Head, wanted: Mapping[int, Head], seen_s: Mapping[int, float], clock: Clock) -> None:
        """wanted, seen_s: as `Pulling`'s."""
        self.head, self._wanted, self._all_seen_s, self._clock = head, wanted, seen_s, clock
        self._asked_s = clock.now()
        self.seen_s: float | None = None
        """When it was first heard of, if that is known."""
        self.waited_s = 0.0
        """From then on, before the pull had its turn, or after an outage began once more."""

    def __call__(self) -> Head:
        now, p = self._clock.now(), self.head.fragment
        self.head, self.seen_s = self._wanted.get(p, self.head), self._all_seen_s.get(p)
        self.waited_s = 0.0 if self.seen_s is None else now - max(self._asked_s, self.seen_s)
        return self.head


TAPE_BLOCK_S = 1.0
LOOK_AT_ALL_S = 5.0
"""Time between two looks at all heads, whatever the tape says."""
LOST_HEADS_S = 15.0
"""Heads that are gone for so long are not put back by a syncer: learners begin again with what they have adopted."""


class Following:
    """How one learner comes to know that heads have moved or gone."""

    def __init__(
        self, member: Member, pulling: Pulling, publishing: Publishing, version_0: Version0, feedback: Feedback
    ) -> None:
        self._member, self._shared = member, member.shared
        self._pulling, self._publishing = pulling, publishing
        self._version_0, self._feedback = version_0, feedback
        self._refused = Refused(member, publishing.newest)
        self._look_at_all_s = 0.0
        self._outages = member.outages.count
        """Failed calls that were known when all heads were last looked at."""
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
            self._shared.offer_again = True  # what the bus acknowledged before may be lost with its last second
            self._pulling.part_known = False
        while not outages.gap:
            if self._member.clock.now() >= self._look_at_all_s:
                await self._look_at_all()
                if len(cursors) < bus.keys.groups:  # a server was away
                    cursors = await bus.tape_end() | cursors
            entries = await bus.read_tape(cursors, TAPE_BLOCK_S)
            cursors |= {entry.group: entry.entry_id for entry in entries}
            for record in (entry.record for entry in entries):
                if isinstance(record, Rejected):
                    self._refused.refused(record)
                elif isinstance(record, Committed):
                    if self._refused.fragments:
                        self._refused.merged(record)
                    # One that was put back: what was offered on it may be lost with its head.
                    if record.base_digest is None:
                        self._shared.offer_again, self._pulling.part_known = True, False
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
        there = await pulling.look(range(len(member.layout.fragments)))
        if pulling.reached and member.outages.count != self._outages:
            # One of several nodes was away, which ends no work but its own: it may have lost what it had acknowledged.
            self._outages = member.outages.count
            self._shared.offer_again |= member.bus.keys.groups > 1
        if there:
            if lost is not None:
                member.log.info("heads_found", after_s=round(now - lost, 1))
                self._lost_since_s, self._shared.offer_again = None, True
            return
        self._look_at_all_s = now + TAPE_BLOCK_S
        if lost is None:
            self._lost_since_s = now
            detail = f"a syncer puts them back, or this learner uploads what it has adopted in {LOST_HEADS_S:g} s"
            member.log.warning("heads_lost", detail=detail)
        elif now - lost >= LOST_HEADS_S:
            nonce = f"{pulling.looks:04x}{member.incarnation}"[:32]  # a fresh one: other values than at first
            await self._version_0.ensure(nonce, trained=True)
            self._look_at_all_s = now
