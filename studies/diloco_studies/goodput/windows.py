"""The syncer's decisions over learners' time lines, in virtual time. Pure: no tensors, no asyncio.

One fragment is followed, and all its decisions are the production code's: `syncer.window` says who is in, how long to
wait and when to merge, `syncer.grace` how long the grace is, `syncer.downloads` how long uploads may take,
`syncer.membership` and `syncer.admission` who is live, expected and waited for. What is left out is tensor arithmetic,
the bus, and syncers that fail. Learners do as `workers.rounds` says: due after the interval in force, followers at
their next step boundary, renewals of what waits, adoption at a step boundary. A learner that is paused reports nothing.
The P fragments are alike but for their turn, so one of them stands for all.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from diloco.pipeline.messages.fragment import DeltaHeader, Head, MergedBase, RefusalReason, WindowView
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.outer_cost import CORE_FLOPS
from diloco.pipeline.ramps import is_stretched, overlap_in_force, stretched
from diloco.pipeline.site import outer_operations
from diloco.syncer.admission import STRANGERS, Accepted, DeltaFormat, Offer, Refused, Suspects
from diloco.syncer.downloads import UploadEstimator
from diloco.syncer.grace import GraceEstimator, MergedTimes, RoundTrips, grace_covers_step
from diloco.syncer.membership import RunWatch
from diloco.syncer.window import Conditions, Merge, Reopened, State, Wait, Window
from diloco.workers.rounds import renewed_after
from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.job import Timeline
from diloco_studies.goodput.link import Link, link_of
from diloco_studies.goodput.parties import CODEC, LAYOUT, TOKENS, Party, StepClock, bare, digest_of

SETTLED = 8
"""The first windows are not counted: all learners begin at once."""


@dataclass(slots=True)
class Tally:
    """What was decided, in sums."""

    merges: int = 0
    participants: int = 0
    staleness: int = 0
    grace_s: float = 0.0
    sync_s: float = 0.0
    trained: int = 0
    """Inner steps of all learners between adoptions."""
    overwritten: int = 0
    """Of them, those trained past a snapshot, or never published, and replaced."""
    rejected: int = 0
    reopened: int = 0
    longest_gap_s: float = 0.0
    first_s: float = math.nan
    last_s: float = math.nan

    def summary(self, fragments: int) -> dict[str, float]:
        """Means; {} before two merges were counted."""
        if self.merges < 2:
            return {}
        return {
            "mean_participants": self.participants / self.merges,
            "mean_staleness": self.staleness / self.participants,
            "mean_grace_s": self.grace_s / self.merges,
            "mean_sync_s": self.sync_s / self.merges,
            "overwritten": self.overwritten / max(1, self.trained),
            "rejected": self.rejected / max(1, self.trained),
            "outer_steps_per_hour": 3600.0 * fragments * (self.merges - 1) / (self.last_s - self.first_s),
            "longest_gap_s": self.longest_gap_s,
            "reopened": self.reopened / self.merges,
        }


@dataclass(frozen=True, slots=True)
class Learner:
    """One learner's time line and the length of its inner steps."""

    timeline: Timeline
    step_s: float


class _Event(NamedTuple):
    at_s: float
    last: bool
    """A step boundary: what else happens then comes first, as a learner adopts before it publishes."""
    number: int
    kind: str
    party: Party | None = None
    version: int = 0
    offer: Offer | None = None


class Follower:
    """Follows one fragment."""

    def __init__(
        self,
        constants: Constants,
        learners: Sequence[Learner],
        sync: SyncSpec,
        rng: np.random.Generator,
        *,
        waits: bool,
    ) -> None:
        """`waits`: learners stand still from their publication until the merge."""
        self._sync, self._waits = sync, waits
        self._gamma = constants.grace_gamma
        self._link: Link = link_of(constants)
        self._bits = constants.params * constants.wire_bits / sync.fragments
        self._pull_bits = constants.params * constants.global_bits / sync.fragments
        self._merge_s = self._bits / 8 / constants.merge_rate / constants.syncer_cores
        operations = outer_operations(constants, constants.outer) / sync.fragments
        self._sync_s = constants.sync_time + operations / CORE_FLOPS / constants.syncer_cores
        self._parties = [
            Party(m, StepClock(one.timeline, one.step_s, constants.step_jitter, rng)) for m, one in enumerate(learners)
        ]
        self._of = {party.name: party for party in self._parties}
        self._times = MergedTimes()
        self._watch = RunWatch(sync, constants.liveness, drain_s=0.0, latency_s=2 * constants.latency)
        self._grace, self._uploads, self._suspects = GraceEstimator(), UploadEstimator(), Suspects()
        self._queue: list[_Event] = []
        self._numbers = itertools.count()
        self._round_trips, self._intervals = RoundTrips(), {0: sync.sync_interval}
        """Version -> its interval."""
        self._version, self._merged = 0, tuple[MergedBase, ...]()
        self._told_attempt = -1
        self._here: set[str] = set()
        """Entries whose payload is on the bus."""
        self._sent_s: dict[str, float] = {}
        self._merging: Merge | None = None
        self._reopened = 0
        self.tally = Tally()
        self._window = self._new_window(0.0)
        for party in self._parties:
            self._at(party.clock.wall_s(1 if not waits else sync.sync_interval), "boundary", party)

    def _at(
        self, at_s: float, kind: str, party: Party | None = None, version: int = 0, offer: Offer | None = None
    ) -> None:
        if at_s < math.inf:
            event = _Event(at_s, kind == "boundary", next(self._numbers), kind, party, version, offer)
            heapq.heappush(self._queue, event)

    def run(self, until_s: float, merges: float = math.inf) -> None:
        """Go on until a time, or so many counted merges and windows opened again."""
        while self._queue and self._queue[0].at_s < until_s and self.tally.merges + self._reopened < merges:
            event = heapq.heappop(self._queue)
            getattr(self, f"_on_{event.kind}")(event.at_s, event)
        for party in self._parties:
            if party.waits_since is not None:
                party.waits.append((party.waits_since, until_s))
                party.clock.waited_s += party.clock.trained_s(until_s) - party.clock.trained_s(party.waits_since)

    def waits(self) -> list[tuple[list[tuple[float, float]], float]]:
        """Of each learner: spans of waiting for merges, and the training time that they cost."""
        return [(party.waits, party.clock.waited_s) for party in self._parties]

    # --- learners ----------------------------------------------------------------------------------------

    def _on_boundary(self, now: float, event: _Event) -> None:
        """A learner's step boundary at which it may have something to publish."""
        party = event.party
        assert party is not None  # noqa: S101  # of this kind of event
        if party.version != event.version or party.waits_since is not None:
            return
        step = party.clock.step_at(now)
        steps = step - party.adopted_step
        due = steps >= (self._intervals[party.version] if party.version or self._waits else 1)
        window = self._window
        opened = window.state is not State.IDLE and window.version == party.version and not self._waits
        member = opened and party.name in window.members
        again = opened and not member and window.attempt > party.window_attempt
        first, whole = party.published_step is None, party.uploaded_serial == party.serial
        if steps > 0 and ((first and (due or (opened and not member))) or (not first and again)):
            self._publish(party, now, step, due)
        elif party.published_step is not None and whole and step >= self._renewed_at(party, party.published_step):
            self._publish(party, now, step, due, renews=True)
        else:
            return
        party.window_attempt = window.attempt if opened else 0

    def _renewed_at(self, party: Party, published_step: int) -> int:
        """The inner step at whose end it renews the delta of an earlier one."""
        more = renewed_after(self._sync, self._intervals[party.version], published_step - party.adopted_step)
        return published_step + math.ceil(more)

    def _publish(self, party: Party, now: float, step: int, due: bool, renews: bool = False) -> None:
        attempt = max(party.published_attempt + 1, self._window.attempt)
        header = party.publish(step, attempt, due)
        offer = Offer(f"{party.serial}-0@{party.name}", header)
        whole_s = self._link.ends_s(now, self._bits)
        told_s = whole_s if renews else now  # of a renewal the payload goes first
        self._sent_s[offer.entry_id] = told_s
        self._at(self._link.arrives_s(told_s), "header", offer=offer)
        self._at(self._link.arrives_s(whole_s), "uploaded", offer=offer)
        if self._waits and party.waits_since is None:
            party.waits_since = now

    def _on_again(self, now: float, event: _Event) -> None:
        """A waiting learner's delta was dropped: it publishes the same training with the next attempt."""
        party = event.party
        assert party is not None and party.published_step is not None  # noqa: S101, PT018  # of this kind of event
        if party.version == event.version and party.waits_since is not None and not self._pending(party):
            self._publish(party, now, party.published_step, due=True)

    def _pending(self, party: Party) -> bool:
        """Whether its last delta has not been dropped."""
        return f"{party.serial}-0@{party.name}" in self._sent_s

    def _on_adopt(self, now: float, event: _Event) -> None:
        party = event.party
        assert party is not None  # noqa: S101  # of this kind of event
        if event.version <= party.version:
            return
        if party.waits_since is not None:
            party.waits.append((party.waits_since, now))
            party.clock.waited_s += party.clock.trained_s(now) - party.clock.trained_s(party.waits_since)
            party.waits_since = None
        step = party.clock.step_at(now)
        if self._counting:
            self.tally.trained += step - party.adopted_step
            kept = party.adopted_step if party.published_step is None else party.published_step
            self.tally.overwritten += step - kept
        party.version, party.adopted_step = event.version, step
        party.published_step, party.published_attempt, party.window_attempt = None, -1, 0
        self._at(party.clock.wall_s(step + self._intervals[event.version]), "boundary", party, event.version)
        opened = self._window.state is not State.IDLE and self._window.version == event.version
        if opened and not self._waits:
            self._look(party, now)
        self._decide(now)

    def _look(self, party: Party, now: float) -> None:
        """It hears that the window is open, and may follow at its next step boundary."""
        step = party.clock.step_at(self._link.arrives_s(now)) + 1
        self._at(party.clock.wall_s(step), "boundary", party, party.version)

    # --- the syncer --------------------------------------------------------------------------------------

    @property
    def _counting(self) -> bool:
        return self._version > SETTLED

    def _on_header(self, now: float, event: _Event) -> None:
        assert event.offer is not None  # noqa: S101  # of this kind of event
        self._offer(event.offer, now)
        self._decide(now)

    def _offer(self, offer: Offer, now: float) -> None:
        self._suspects.header_arrived(offer.header.learner)
        answer = self._window.offer(offer, now)
        if isinstance(answer, Refused):
            self._suspects.refused(offer.header.learner, answer.reason)
            self._drop(offer, answer.lost_tokens)
            return
        if answer.replaced is not None:
            same = answer.replaced.header.base_version == offer.header.base_version
            self._drop(answer.replaced, 0 if same else answer.replaced.header.tokens)
        if isinstance(answer, Accepted) and offer.entry_id in self._here:
            self._window.uploaded(offer)

    def _drop(self, offer: Offer, lost_tokens: int = 0) -> None:
        self._here.discard(offer.entry_id)
        self._sent_s.pop(offer.entry_id, None)
        if self._counting:
            self.tally.rejected += lost_tokens // TOKENS

    def _on_uploaded(self, now: float, event: _Event) -> None:
        offer = event.offer
        assert offer is not None  # noqa: S101  # of this kind of event
        self._told_whole(offer.header, now)
        if offer.entry_id not in self._sent_s:  # dropped by now
            return
        self._here.add(offer.entry_id)
        if self._uploads.observe(now - self._sent_s[offer.entry_id]):
            self._suspects.delta_usable(offer.header.learner)
        self._window.uploaded(offer)
        self._decide(now)

    def _told_whole(self, header: DeltaHeader, now: float) -> None:
        """Its learner knows that all of a delta is on the bus, and renews it should nothing become of it."""
        party = self._of[header.learner]
        party.uploaded_serial = header.serial
        if not self._waits and header.serial == party.serial and party.published_step is not None:
            at = max(self._renewed_at(party, party.published_step), party.clock.step_at(now) + 1)
            self._at(party.clock.wall_s(at), "boundary", party, party.version)

    def _on_timer(self, now: float, event: _Event) -> None:
        if event.version == self._version:
            self._decide(now)

    def _decide(self, now: float) -> None:
        window = self._window
        if self._merging is not None or not window.pending():
            return
        while isinstance(decision := window.decide(now, self._conditions(now)), Reopened):
            self._overdue(decision, now)
            self._reopened += 1
            self.tally.reopened += self._counting
            for offer in window.not_uploaded():  # late ones are members now, and may be here
                if offer.entry_id in self._here:
                    window.uploaded(offer)
        if isinstance(decision, Wait):
            if decision.until is not None:
                self._at(decision.until, "timer", version=self._version)
            if window.state is not State.IDLE and window.attempt != self._told_attempt:
                self._told_attempt = window.attempt
                self._tell(now)
            return
        self._overdue(decision, now)
        self._merging = decision
        staged_s = now + len(decision.contributions) * self._merge_s + self._sync_s
        self._at(staged_s, "commit", version=self._version)

    def _tell(self, now: float) -> None:
        """The window is open, or open again: learners that are not in it hear so."""
        for party in self._parties:
            if party.version == self._version and party.name not in self._window.members:
                if not self._waits:
                    self._look(party, now)
                elif party.waits_since is not None:  # its delta was dropped while it waits
                    self._at(self._link.arrives_s(now), "again", party, party.version)

    def _conditions(self, now: float) -> Conditions:
        watch = self._watch
        told = self._intervals[self._version]
        overlap = overlap_in_force(self._sync, self._version, told)
        longer = is_stretched(self._sync, self._version, told)
        times = self._slowest_s(now), self._times.pull_s, overlap
        grace_s = self._grace.grace_s(*times, self._gamma, 2 * watch.latency_s, longer)
        return watch.conditions(0, self._version, grace_s, self._uploads.upload_s, self._suspected())

    def _slowest_s(self, now: float) -> float | None:
        """As `MergedTimes`, of those that the window waits for."""
        self._watch.reports = [party.seen(now) for party in self._parties]
        trusted = self._watch.trusted(0, self._version, self._suspected())
        return self._times.slowest_s(report.step_s for report in trusted)

    def _suspected(self) -> frozenset[str]:
        expected = self._watch.expected(0, self._version)
        return self._suspects.among([seen.report.learner for seen in expected], self._times.learners)

    def _overdue(self, decision: Merge | Reopened, now: float) -> None:
        self._uploads.timed_out([now - self._sent_s[offer.entry_id] for offer in decision.overdue])
        for learner in decision.in_vain:
            self._suspects.refused(learner, RefusalReason.UPLOAD_TIMEOUT)
        for offer in decision.overdue:
            self._drop(offer, offer.header.tokens)

    def _on_commit(self, now: float, event: _Event) -> None:
        decision, self._merging = self._merging, None
        assert decision is not None  # noqa: S101  # of this kind of event
        late = self._window.held.offers
        overlap = overlap_in_force(self._sync, self._version, self._intervals[self._version])
        headers = [offer.header for offer in decision.contributions]
        if any(header.learner not in self._times.learners for header in headers):
            self._suspects.header_arrived(STRANGERS)
        self._times.merged(self._version + 1, headers)
        slowest_s = self._slowest_s(now)
        self._grace.observe(decision.quorum_s, now - decision.fixed_at, slowest_s, overlap)
        waited = grace_covers_step(decision.grace_s, slowest_s)
        self._suspects.closed(decision.silent if waited else (), self._times.learners)
        pulled_s = self._link.ends_s(self._link.arrives_s(now), self._pull_bits)
        if self._counting:
            self._count(decision, now, decision.grace_s, pulled_s - decision.fixed_at)
        self._intervals[self._version + 1] = self._next_interval(decision, now, pulled_s)
        self._version += 1
        merged = {m.learner: m for m in self._merged if m.base_version >= self._version - 1}
        for offer in decision.contributions:
            h = offer.header
            merged[h.learner] = bare(
                MergedBase, learner=h.learner, incarnation=h.incarnation, base_version=h.base_version, tokens=h.tokens
            )
            self._drop(offer)
        self._merged = tuple(merged.values())
        self._window, self._told_attempt = self._new_window(now), -1
        for offer in late:
            self._offer(offer, now)
        for party in self._parties:
            party.pull_s = pulled_s - now  # told with the version that it adopts
            clock = party.clock
            at_s = pulled_s if party.waits_since is not None else clock.wall_s(clock.step_at(pulled_s) + 1)
            self._at(at_s, "adopt", party, self._version)
        self._decide(now)

    def _next_interval(self, merge: Merge, now: float, pulled_s: float) -> int:
        """Of the version that is made, by the round trips before: its owner knows no more when it commits."""
        if self._waits:
            return self._sync.sync_interval
        trip = self._round_trips.steps(self._times.steps, 2 * self._watch.latency_s)
        if not merge.in_vain:
            self._round_trips.observe(merge.grace_s + pulled_s - merge.fixed_at)
        return stretched(self._sync, self._version + 1, trip)

    def _count(self, merge: Merge, now: float, grace_s: float, sync_s: float) -> None:
        tally = self.tally
        tally.merges += 1
        tally.participants += len(merge.contributions)
        tally.staleness += sum(self._version - offer.header.base_version for offer in merge.contributions)
        tally.grace_s += grace_s
        tally.sync_s += sync_s
        if tally.merges > 1:
            tally.longest_gap_s = max(tally.longest_gap_s, now - tally.last_s)
        else:
            tally.first_s = now
        tally.last_s = now

    def _new_window(self, now: float) -> Window:
        head = bare(
            Head,
            version=self._version,
            digest=digest_of(self._version),
            previous_digest=digest_of(self._version - 1) if self._version else None,
            window=bare(WindowView, state="idle", attempt=0),
            merged=self._merged,
        )
        return Window(head, DeltaFormat(LAYOUT, CODEC, 1), now)
