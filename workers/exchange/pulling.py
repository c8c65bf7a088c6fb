"""Follow the heads, pull the globals that they name, and hand them to the training side. Runs on asyncio.

The tape wakes a learner and reports merges and refusals; what a head says is read from the head itself. After any gap
in the tape, all heads are read again. The bus skips unreadable entries: a merge that such an entry hides is seen at
the next poll of all heads (`look_s`), a refusal that it hides is neither logged nor counted.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

from diloco.pipeline.bus.by_group import by_group
from diloco.pipeline.bus.ports import Clock
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.ema import Ema
from diloco.pipeline.errors import BadMessage
from diloco.pipeline.messages.fragment import Committed, Head, Rejected, TapeRecord, WindowChanged
from diloco.pipeline.retry import Retries
from diloco.workers.exchange.carrier import Feedback, NoDeltas, on_all_lanes
from diloco.workers.exchange.first_version import Version0
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.refused import Refused
from diloco.workers.rounds import Base, OpenWindow
from diloco.workers.step_times import DECAY
from diloco.workers.times import TIMES


class PullTimes:
    """Smoothed time of an incarnation's pulls, s: the delivery in the grace's sync time (paper, adaptive grace window).

    A pull is timed from the learner's first sight of the head to the global in its hands, all by the learner's own
    clock. The news of a commit takes about as long to arrive as the commit's answer, which the syncer has counted by
    then. So the syncer's part and this one add up to the time from the fixed set of contributions to the pulled global,
    without comparing the clocks of two machines.
    """

    def __init__(self, mean_elements: float) -> None:
        """mean_elements: mean size of the layout's fragments, above 0."""
        self._mean = mean_elements
        self._elements, self._took_s = Ema(DECAY), Ema(DECAY)

    def observe(self, elements: int, seconds: float) -> None:
        """Add one pull of a fragment of this many elements."""
        self._elements.observe(elements)
        self._took_s.observe(seconds)

    @property
    def pull_s(self) -> float:
        """Seconds for a fragment of mean size; 0.0 before the first pull. Larger fragments are scaled by their size."""
        elements, took_s = self._elements.value, self._took_s.value
        return 0.0 if elements is None or took_s is None else took_s * self._mean / elements


class Pulling:
    """One learner's knowledge of the heads, and the globals that it has pulled."""

    def __init__(self, member: Member, carrier: NoDeltas) -> None:
        self._member, self._carrier = member, carrier
        self.latest: dict[int, tuple[int, bytes]] = {}  # fragment -> (version, digest) last handed to the training side
        self._wanted: dict[int, Head] = {}  # fragment -> its newest head, while that is not pulled
        # Fragment -> time of the first sight of its wanted head; not known after an outage.
        self._seen_s: dict[int, float] = {}
        self._times = PullTimes(member.layout.elements / len(member.layout.fragments))
        self._wakes = [asyncio.Event() for _ in range(carrier.lanes)]
        self.looks = 0
        self.reached = False  # True if the last poll reached all nodes
        self.part_known = True  # False from a loss (or restoration) of run data until the run's state was read again
        self._told: set[str] = set()  # errors of unreadable heads that were logged since the last poll of all heads
        self._looked: dict[int, int] = {}  # fragment -> number of the look that has last seen its head

    async def look(self, fragments: Iterable[int]) -> bool:
        """Read these heads from the nodes that can be reached; return False if one of them is missing.

        An unreadable head is logged and does not count as missing.

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
            # `Rounds.in_part` counts by the bases what was published in the previous part of the run, so the new part
            # must be known before the bases are replaced. The state is read here and not in `_pull`: a call that fails
            # there would lose a global that has arrived.
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
                continue  # a poll that began later was answered first: its head is newer
            p, window = head.fragment, head.window
            self._looked[p] = number
            self._carrier.feedback.merged(p, head.merged)  # known from the tape already, unless that had a gap
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
        """Pull each wanted global, one after the other on each lane, until cancelled or an error of the bus.

        Raises:
            BusError: call it again.
        """
        lanes = self._carrier.lanes
        if lanes == 1:
            await self._pull_wanted_on(0)
        else:  # the node of one lane's fragments may be away
            await on_all_lanes(lambda lane: self._member.outages.retry(self._pull_wanted_on, lane), lanes)

    async def _pull_wanted_on(self, lane: int) -> None:
        retries, clock, lanes, wake = Retries(TIMES.retry), self._member.clock, self._carrier.lanes, self._wakes[lane]
        for seen in [seen for seen in self._seen_s if seen % lanes == lane]:
            del self._seen_s[seen]  # this begins again after an outage, whose duration must not count as a pull's
        while True:
            wake.clear()  # before looking at `_wanted`: a head that comes later sets it again
            p, wait_s = retries.choose([p for p in self._wanted if p % lanes == lane], clock.now())
            if p is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await wake.wait()
                continue
            chosen = _HeadChooser(self._wanted[p], self._wanted, self._seen_s, clock)
            pulled = await self._pull(chosen)
            head, seen_s = chosen.head, chosen.seen_s
            layout = self._member.layout.fragments[p]
            # Averaged buffers are left out: they are so small that the call takes longer than their bytes.
            if pulled and seen_s is not None and not layout.averaged:
                self._times.observe(layout.elements, clock.now() - seen_s - chosen.waited_s)
                self._member.shared.pull_s = self._times.pull_s
            wanted = self._wanted.get(p)
            if wanted is not None and (wanted.version, wanted.digest) == (head.version, head.digest):
                del self._wanted[p]  # even if a poll has set it again meanwhile: adopting twice would cost training
            retries.tried(p, pulled, clock.now())
            if not pulled:
                await self.look([p])
                again = self._wanted.get(p)
                if seen_s is not None and again is not None and again.digest == head.digest:
                    self._seen_s[p] = seen_s  # failed tries count towards the duration of the pull

    async def pull(self, head: Head) -> bool:
        """Fetch a head's global and hand it to the training side; return False if it was replaced meanwhile.

        Raises:
            BusError: it cannot be read.
        """
        return await self._pull(_HeadChooser(head, {}, {}, self._member.clock))

    async def _pull(self, chosen: "_HeadChooser") -> bool:
        values, member = await self._carrier.pull(chosen), self._member
        if values is None:
            return False
        head, p = chosen.head, chosen.head.fragment
        if p in self.latest and head.version <= self.latest[p][0]:  # a rewind: residuals belong to lost versions
            self._carrier.feedback.reset(p)
        self.latest[p] = (head.version, head.digest)
        member.shared.merged_tokens[p] = head.merged_tokens
        member.shared.adoptions[p] = Base(p, head.version, head.digest, values, head.interval)
        member.log.debug("fragment_pulled", fragment=p, version=head.version)
        return True


class _HeadChooser:
    """A callable that chooses the head to pull: the newest known head of a fragment at the time of the call."""

    def __init__(self, head: Head, wanted: Mapping[int, Head], seen_s: Mapping[int, float], clock: Clock) -> None:
        """wanted, seen_s: the dictionaries of `Pulling`, which change between calls."""
        self.head, self._wanted, self._all_seen_s, self._clock = head, wanted, seen_s, clock
        self._asked_s = clock.now()
        self.seen_s: float | None = None  # time of the first sight of the head, if that is known
        self.waited_s = 0.0  # from that time until the pull had its turn, or began again after an outage

    def __call__(self) -> Head:
        now, p = self._clock.now(), self.head.fragment
        self.head, self.seen_s = self._wanted.get(p, self.head), self._all_seen_s.get(p)
        self.waited_s = 0.0 if self.seen_s is None else now - max(self._asked_s, self.seen_s)
        return self.head


class Following:
    """How one learner notices that heads have moved or were lost."""

    def __init__(
        self,
        member: Member,
        pulling: Pulling,
        newest: Mapping[int, tuple[int, int]],
        version_0: Version0,
        feedback: Feedback,
    ) -> None:
        """newest: fragment -> (base version, attempt) of the learner's last delta; `Publishing` keeps it up to date."""
        self._member, self._shared = member, member.shared
        self._pulling, self._newest = pulling, newest
        self._version_0, self._feedback = version_0, feedback
        self._refused = Refused(member, newest)
        self._look_at_all_s = 0.0
        self._outages = member.outages.count  # failed calls, as of the last poll of all heads
        self._lost_since_s: float | None = None  # time since which known heads are missing; None: none is

    async def follow(self) -> None:
        """Follow the tape until a call of the bus has failed; what the tape said meanwhile is then skipped.

        Raises:
            BusError: call it again.
        """
        outages, bus = self._member.outages, self._member.bus
        gap, outages.gap = outages.gap, False
        # The tape's end is taken before all heads are read: whatever changes after that is on the tape behind it.
        try:
            cursors = await bus.tape_end()
        except BaseException:
            outages.gap |= gap
            raise
        self._look_at_all_s = 0.0
        if gap:
            self._shared.offer_again = True  # a restarted bus may have lost its last second, acknowledged or not
            self._pulling.part_known = False
        while not outages.gap:
            if self._member.clock.now() >= self._look_at_all_s:
                await self._look_at_all()
                if len(cursors) < bus.keys.groups:  # a server could not be reached
                    cursors = await bus.tape_end() | cursors
            entries = await bus.read_tape(cursors, BUS_TIMES.block_s)
            cursors |= {entry.group: entry.entry_id for entry in entries}
            for record in (entry.record for entry in entries):
                if isinstance(record, Rejected):
                    self._refused.refused(record)
                elif isinstance(record, Committed):
                    if self._refused.fragments:
                        self._refused.merged(record)
                    # Without a base digest, the head was restored: deltas offered on it may be lost with the old head.
                    if record.base_digest is None:
                        self._shared.offer_again, self._pulling.part_known = True, False
                    self._feedback.merged(record.fragment, record.contributions)
                    self._feedback.passed(record.fragment, record.version)
            told = {entry.record.fragment for entry in entries if not self._knows(entry.record)}
            if told:
                await self._pulling.look(sorted(told))

    def _knows(self, record: TapeRecord) -> bool:
        """Return whether a record brings nothing new: a window's first attempt on a base that this learner published
        on.

        Such a window asks for nothing that this learner has not given, and the fragment's next record is looked at
        anyway.
        """
        if not isinstance(record, WindowChanged) or record.attempt > 0:
            return False
        return self._newest.get(record.fragment, (-1, 0))[0] == record.version

    async def _look_at_all(self) -> None:
        """Look at all heads; if some were missing for long, restart the run from the globals that were adopted."""
        member, pulling = self._member, self._pulling
        now, lost = member.clock.now(), self._lost_since_s
        self._look_at_all_s = now + TIMES.look_s
        there = await pulling.look(range(len(member.layout.fragments)))
        if pulling.reached and member.outages.count != self._outages:
            # One of several nodes was unreachable. That sets no `gap`, since the work on the other nodes continued, but
            # the node may have lost what it had acknowledged.
            self._outages = member.outages.count
            self._shared.offer_again |= member.bus.keys.groups > 1
        if there:
            if lost is not None:
                member.log.info("heads_found", after_s=round(now - lost, 1))
                self._lost_since_s, self._shared.offer_again = None, True
            return
        self._look_at_all_s = now + BUS_TIMES.block_s
        if lost is None:
            self._lost_since_s = now
            after = f"after {TIMES.heads_lost_s:g} s"
            detail = f"a syncer restores them; otherwise this learner uploads what it has adopted {after}"
            member.log.warning("heads_lost", detail=detail)
        elif now - lost >= TIMES.heads_lost_s:
            nonce = f"{pulling.looks:04x}{member.incarnation}"[:32]  # a new nonce, since the values are not the first
            await self._version_0.ensure(nonce, trained=True)
            self._look_at_all_s = now
