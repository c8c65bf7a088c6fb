"""The window under arbitrary histories: a state machine offers, uploads, fails, waits, merges and restarts.

The machine stands for the window's owner and keeps its own books (`held`: what is pending on the stream,
`uploaded`: what is complete, `merged`: what went into any version); the window's promises are checked against them.
"""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diloco.pipeline.messages.fragment import DeltaHeader, MergedBase, RefusalReason
from diloco.syncer.admission import HELD_A_LEARNER, Accepted, DeltaFormat, Held, Offer, Refused
from diloco.syncer.times import TIMES
from diloco.syncer.window import Collecting, Conditions, Merge, Reopened, State, Uploading, Wait, Window
from tests import samples

LEARNERS = ("l0", "l1", "l2", "l3")
LAYOUT = bytes(16)
FORMAT = DeltaFormat(LAYOUT, "fp32", 3)


def digest(version: int) -> bytes:
    return bytes([version % 256]) * 16


def attempts(*learners: str) -> list[Offer]:
    """A delta of each on the same base, one attempt after the other."""
    return [Offer(f"{n}-0", samples.header(name, attempt=n)) for n, name in enumerate(learners, start=1)]


def deadline_of(window: Window) -> float | None:
    return getattr(window.phase, "deadline", None)


class WindowMachine(RuleBasedStateMachine):
    """One fragment over many versions, seen by its owner."""

    @initialize(quorum=st.integers(1, 3), version=st.integers(0, 2))
    def start(self, quorum: int, version: int) -> None:
        self.quorum = quorum
        self.version = version
        self.now = 0.0
        self.entries = 0
        self.draining = False
        self.held: dict[str, Offer] = {}
        self.uploaded: set[str] = set()
        self.joined: dict[str, float] = {}
        """When a member's delta took its place."""
        self.merged: set[tuple[str, str, int]] = set()
        self.record: dict[tuple[str, str], MergedBase] = {}
        self.seen: list[DeltaHeader] = []
        self.merging: Merge | None = None
        self.opened_at: float | None = None
        self.window = self.fresh(0)

    def fresh(self, attempt: int) -> Window:
        self.refused: set[str] = set()
        head = samples.head(
            version=self.version,
            digest=digest(self.version),
            previous_digest=digest(self.version - 1) if self.version else None,
            merged=tuple(self.record.values()),
            window=samples.IDLE.model_copy(update={"attempt": attempt}),
        )
        return Window(head, FORMAT, self.now)

    # --- what the owner does with the answers ----------------------------------------------------------

    def send(self, header: DeltaHeader, entry_id: str | None = None) -> Accepted | Held | Refused:
        """Offer a header and keep the books; the checks of one offer are here."""
        window = self.window
        if entry_id is None:
            self.entries += 1
            entry_id = f"{self.entries}-0"
        offer = Offer(entry_id, header)
        state, members, attempt = window.state, window.members, window.attempt
        answer = window.offer(offer, self.now)
        if isinstance(answer, Refused):
            assert answer.lost_tokens >= 0
            assert (window.state, window.members) == (state, members), "a refused offer changed the window"
            self.held.pop(entry_id, None)
        else:
            assert header.steps > 0
            assert header.tokens > 0
            assert header.layout == LAYOUT
            assert self.version - 1 <= header.base_version <= self.version, "staleness over 1 or a future base"
            assert header.base_digest == digest(header.base_version)
            assert (header.learner, header.incarnation, header.base_version) not in self.merged, "merged before"
            self.held[entry_id] = offer
        if isinstance(answer, Held) and answer.replaced is not None:
            older = answer.replaced.header
            assert (older.learner, older.incarnation) == (header.learner, header.incarnation)
            assert older.base_version == header.base_version
            assert older.attempt <= header.attempt
            del self.held[answer.replaced.entry_id]
        if isinstance(answer, Accepted):
            assert state is not State.MERGING, "a member joined while merging"
            if state is State.UPLOADING:
                assert window.members == members, "a learner joined after M_t was fixed"
                assert answer.replaced is not None
                older = answer.replaced.header
                assert (older.incarnation, older.base_version) == (header.incarnation, header.base_version)
            self.joined[entry_id] = self.now
            if answer.replaced is not None:
                before = answer.replaced.header
                assert before.learner == header.learner
                if (before.incarnation, before.base_version) == (header.incarnation, header.base_version):
                    complete = answer.replaced.entry_id in self.uploaded
                    assert before.attempt <= header.attempt
                    assert not (complete and state is State.UPLOADING), "a complete contribution was given up"
                del self.held[answer.replaced.entry_id]
        else:
            assert window.members == members
        assert (window.state, window.attempt) == (state, attempt), "an offer decides nothing"
        return answer

    def conditions(self, data: st.DataObject) -> Conditions:
        live = frozenset(data.draw(st.sets(st.sampled_from(LEARNERS)), label="live"))
        quorum = max(1, min(self.quorum, len(live))) if self.draining else self.quorum
        entries = sorted(offer.entry_id for offer in self.window.not_uploaded())
        return Conditions(
            quorum=quorum,
            expected=live,
            live=len(live),
            grace_s=data.draw(st.sampled_from([None, 0.0, 0.5, 3.0]), label="grace_s"),
            upload_s=data.draw(st.sampled_from([0.0, 1.0, 10.0]), label="upload_s"),
            draining=self.draining,
            arriving=data.draw(st.frozensets(st.sampled_from(entries)) if entries else st.just(frozenset())),
        )

    def ask(self, given: Conditions) -> Any:
        """Decide, check what is promised of every decision, and act on it as the owner does."""
        window = self.window
        state, members, attempt, deadline = window.state, window.members, window.attempt, deadline_of(window)
        fixed = window.phase.fixed_at if isinstance(window.phase, Uploading) else self.now
        whole = {m for m in members if any(o.header.learner == m for o in self.complete())}
        due = any(o.header.due and o.header.base_version == self.version for o in window.pending())
        decision = window.decide(self.now, given)
        if state is State.IDLE:
            self.opened_at = self.now
            opens = due or (self.draining and members)
            assert (window.state is State.IDLE) != bool(opens), "it opens for a delta that is due, and no other"
        assert isinstance(decision, Wait) or decision.opened_at == self.opened_at
        if isinstance(decision, Reopened):
            assert window.state is State.COLLECTING
            assert window.attempt == attempt + 1
            assert whole <= set(window.members), "a reopened window lost a complete contribution"
            assert not {o.entry_id for o in decision.overdue} & self.uploaded, "a complete contribution was refused"
            assert {o.header.learner for o in window.held.offers} <= set(window.members), "a late offer was not let in"
            self.check_overdue(decision.overdue, fixed, deadline)
            assert not {o.entry_id for o in decision.overdue} & given.arriving, "what comes was refused"
            for offer in decision.overdue:
                del self.held[offer.entry_id]
            self.refused.clear()
            again = self.ask(given)  # as its owner does
            assert not isinstance(again, Reopened) or not given.upload_s, "it opened again, and nothing had happened"
            return decision
        assert window.decide(self.now, given) == decision, "decide is not idempotent"
        assert window.attempt == attempt
        if isinstance(decision, Wait):
            self.check_wait(decision, given, state, deadline)
        else:
            self.check_overdue(decision.overdue, fixed, deadline)
            assert not {o.entry_id for o in decision.overdue} & given.arriving or self.merging, "what comes was refused"
            self.check_merge(decision, given)
        return decision

    def check_wait(self, decision: Wait, given: Conditions, before: State, deadline: float | None) -> None:
        window, count = self.window, len(self.window.members)
        if window.state in (State.IDLE, State.COLLECTING):
            assert decision.until is None
            assert window.state is State.IDLE or count < given.quorum, "K are in, and no deadline runs"
            return
        assert count >= given.quorum
        assert decision.until == deadline_of(window)
        assert decision.until is not None
        assert self.now < decision.until, "waits for a deadline that is over"
        if window.state is State.GRACE:
            assert given.expected - set(window.members) - self.refused, "nobody is missing, yet the grace goes on"
            if before is State.GRACE:
                assert deadline_of(window) == deadline, "the grace deadline moved"
            else:
                grace = TIMES.first_grace_s if given.grace_s is None else given.grace_s
                assert decision.until == self.now + grace
        elif before is State.UPLOADING and deadline_of(window) != deadline:
            assert self.now >= (deadline or 0.0), "the upload deadline moved before it was over"
            assert {o.entry_id for o in window.not_uploaded()} <= given.arriving, "more time for what does not come"
            assert len(self.complete()) < given.quorum, "a merge waits for what is too slow"
            assert {o.header.learner for o in window.held.offers} <= set(window.members), "somebody else is held up"

    def check_overdue(self, overdue: tuple[Offer, ...], fixed: float, deadline: float | None) -> None:
        """Whoever is refused for its time had all of it: since M_t was fixed, or since it took its place later."""
        for offer in overdue:
            joined = self.joined.get(offer.entry_id, 0.0)
            assert joined <= fixed or self.now - joined >= (deadline or fixed) - fixed, "refused before its time"

    def check_merge(self, decision: Merge, given: Conditions) -> None:
        headers = [o.header for o in decision.contributions]
        assert len(headers) >= given.quorum or self.merging, "a merge below the quorum"
        assert len({h.learner for h in headers}) == len(headers), "a learner counted twice"
        assert {o.entry_id for o in decision.contributions} <= self.uploaded, "an incomplete upload is merged"
        for h in headers:
            assert self.version - 1 <= h.base_version <= self.version, "a merge on a wrong base"
            assert (h.learner, h.incarnation, h.base_version) not in self.merged, "merged twice"
        everybody = {o.header.learner for o in (*decision.contributions, *decision.overdue)}
        assert everybody == set(self.window.members), "a member was forgotten"
        assert self.merging is None or self.merging == decision, "the answer changed after Merge"
        self.merging = decision

    def complete(self) -> list[Offer]:
        members = self.window.pending()[: len(self.window.members)]
        return [offer for offer in members if offer.entry_id in self.uploaded]

    # --- events ----------------------------------------------------------------------------------------

    @rule(
        learner=st.sampled_from(LEARNERS),
        incarnation=st.sampled_from(["0" * 8, "0" * 8, "1" * 8]),
        behind=st.sampled_from([0, 0, 0, 1, 1, 2, -1]),
        attempt=st.integers(0, 2),
        due=st.booleans(),
    )
    def offer(self, learner: str, incarnation: str, behind: int, attempt: int, due: bool) -> None:
        base = max(0, self.version - behind)
        header = samples.header(
            learner, incarnation=incarnation, base_version=base, base_digest=digest(base), attempt=attempt, due=due
        )
        self.seen.append(header)
        answer = self.send(header)
        if base < self.version - 1:
            assert isinstance(answer, Refused)
            assert answer.reason in (RefusalReason.TOO_STALE, RefusalReason.ALREADY_MERGED)

    @rule(learners=st.sets(st.sampled_from(LEARNERS), min_size=1))
    def due_round(self, learners: set[str]) -> None:
        """The usual case: several learners are due on the current base, and their uploads follow at once."""
        for learner in sorted(learners):
            header = samples.header(learner, base_version=self.version, base_digest=digest(self.version))
            self.seen.append(header)
            self.send(header)

    @rule(
        change=st.sampled_from(
            [
                ({"steps": 0}, RefusalReason.NOT_POSITIVE),
                ({"tokens": -5}, RefusalReason.NOT_POSITIVE),
                ({"layout": b"x" * 16}, RefusalReason.WRONG_LAYOUT),
                ({"chunks": 4}, RefusalReason.WRONG_LAYOUT),
                ({"codec": "bf16"}, RefusalReason.WRONG_LAYOUT),
                ({"base_digest": b"x" * 16}, RefusalReason.UNKNOWN_BASE),
            ]
        )
    )
    def forge(self, change: tuple[dict[str, Any], RefusalReason]) -> None:
        """From a learner that was never heard of: refused for exactly what is wrong with it."""
        good = samples.header("forger", base_version=self.version, base_digest=digest(self.version))
        answer = self.send(good.model_copy(update=change[0]))
        assert isinstance(answer, Refused)
        assert answer.reason is change[1]

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        """Any header ever seen comes again, as a new entry."""
        header = data.draw(st.sampled_from(self.seen))
        held = [o for o in self.held.values() if o.header == header]
        answer = self.send(header)
        assert not held or isinstance(answer, Refused), "the same delta is pending twice"

    @precondition(lambda self: self.window.members and not self.merging)
    @rule(data=st.data())
    def upload(self, data: st.DataObject) -> None:
        members = self.window.pending()[: len(self.window.members)]
        offer = data.draw(st.sampled_from(members))
        self.window.uploaded(offer)
        self.uploaded.add(offer.entry_id)

    @precondition(lambda self: not self.merging)
    @rule()
    def upload_all(self) -> None:
        for offer in self.window.pending()[: len(self.window.members)]:
            self.window.uploaded(offer)
            self.uploaded.add(offer.entry_id)

    @precondition(lambda self: self.window.members and not self.merging)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A payload was refused or vanished."""
        members = self.window.pending()[: len(self.window.members)]
        offer = data.draw(st.sampled_from(members))
        waits = any(late.header.learner == offer.header.learner for late in self.window.held.offers)
        self.window.refused(offer)
        del self.held[offer.entry_id]
        self.refused.add(offer.header.learner)
        takes_its_place = waits and self.window.state is State.IDLE
        assert (offer.header.learner in self.window.members) == takes_its_place

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.draining)
    @rule()
    def drain(self) -> None:
        self.draining = True

    @rule(data=st.data())
    def decide(self, data: st.DataObject) -> None:
        decision = self.ask(self.conditions(data))
        if isinstance(decision, Wait) and self.window.state is State.IDLE and self.draining:
            assert not self.window.members, "while draining any member opens the window"

    @precondition(lambda self: self.window.state in (State.GRACE, State.UPLOADING))
    @rule(data=st.data())
    def patience(self, data: st.DataObject) -> None:
        """Once K are in, asking again at each deadline ends the attempt by grace + upload time, whoever is silent."""
        given = replace(self.conditions(data), arriving=frozenset())
        limit = self.now + max(given.grace_s or 0.0, 3.0) + max(given.upload_s, 10.0)
        for _ in range(3):
            decision = self.ask(given)
            if not isinstance(decision, Wait):
                break
            assert decision.until is not None
            self.now = decision.until
        assert not isinstance(decision, Wait)
        assert self.now <= limit

    @precondition(lambda self: self.merging)
    @rule()
    def commit(self) -> None:
        """The head moves; its owner replays what came late."""
        for offer in self.merging.overdue:
            del self.held[offer.entry_id]
        for offer in self.merging.contributions:
            h = offer.header
            del self.held[offer.entry_id]
            self.merged.add((h.learner, h.incarnation, h.base_version))
            self.record[h.learner, h.incarnation] = MergedBase(
                learner=h.learner, incarnation=h.incarnation, base_version=h.base_version, tokens=h.tokens
            )
        self.version += 1
        self.record = {who: m for who, m in self.record.items() if m.base_version >= self.version - 1}
        late, self.merging = self.window.held.offers, None
        self.window = self.fresh(0)
        for offer in late:
            self.send(offer.header, offer.entry_id)

    @precondition(lambda self: self.merging)
    @rule()
    def not_merged(self) -> None:
        """The outcome was not finite: all that was in it is refused, and the window is open as before."""
        self.window.not_merged(self.merging)
        for offer in (*self.merging.contributions, *self.merging.overdue):
            del self.held[offer.entry_id]
            self.refused.add(offer.header.learner)
        self.merging = None
        assert self.window.state is State.COLLECTING

    @rule(attempt=st.integers(0, 3))
    def rebuild(self, attempt: int) -> None:
        """Another owner takes over, or a commit was refused: all that is on the stream is offered again."""
        again, self.held = self.held, {}
        self.merging = None
        self.uploaded.clear()
        self.window = self.fresh(attempt)
        for entry_id, offer in again.items():
            self.send(offer.header, entry_id)

    # --- always ----------------------------------------------------------------------------------------

    @invariant()
    def nothing_pending_is_lost_and_nothing_gone_comes_back(self) -> None:
        if hasattr(self, "window"):
            assert sorted(o.entry_id for o in self.window.pending()) == sorted(self.held)

    @invariant()
    def an_open_window_knows_since_when(self) -> None:
        if hasattr(self, "window"):
            assert getattr(self.window.phase, "opened_at", self.opened_at) == self.opened_at

    @invariant()
    def members_are_distinct(self) -> None:
        if hasattr(self, "window"):
            members = self.window.members
            assert len(set(members)) == len(members)
            assert [o.header.learner for o in self.window.pending()[: len(members)]] == list(members)


def test_a_window_that_was_open_is_open_for_its_next_owner() -> None:
    """Since it has it: what the learners of the former one wait for."""
    head = samples.head(window=samples.IDLE.model_copy(update={"state": "collecting", "attempt": 2}))
    window = Window(head, FORMAT, 7.0)
    assert (window.phase, window.attempt) == (Collecting(7.0), 2)


def test_its_due_attempt_opens_the_window_after_one_that_was_not_due() -> None:
    """Whoever came back, and has a delta here that was not due, opens the window with the next that is."""
    window = Window(samples.head(), FORMAT, 0.0)
    window.offer(Offer("1-0", samples.header("l0", incarnation="a" * 8, due=False)), 0.0)
    early = Offer("2-0", samples.header("l0", incarnation="b" * 8, due=False))
    assert window.offer(early, 1.0) == Held()
    assert window.state is State.IDLE
    due = Offer("3-0", samples.header("l0", incarnation="b" * 8, attempt=1, serial=1))
    assert window.offer(due, 2.0) == Held(replaced=early)
    window.decide(2.0, Conditions(quorum=2, expected=frozenset(), live=1, grace_s=0.0, upload_s=30.0))
    assert window.state is State.COLLECTING


ALONE = Conditions(quorum=1, expected=frozenset({"l0"}), live=1, grace_s=0.0, upload_s=30.0)


def test_what_a_learner_has_outdone_is_not_waited_for() -> None:
    """A learner never uploads an attempt once it has made a later one on the same base."""
    window = Window(samples.head(), FORMAT, 0.0)
    first, second, third = attempts("l0", "l0", "l0")
    window.offer(first, 0.0)
    assert window.decide(0.0, ALONE) == Wait(30.0, "0 of 1 uploaded, waiting for l0")
    assert window.offer(second, 1.0) == Accepted(replaced=first)
    for gone in (first, Offer("9-0", samples.header("l9"))):
        window.uploaded(gone)
        window.refused(gone)
    assert window.decide(1.0, ALONE) == Wait(30.0, "0 of 1 uploaded, waiting for l0")
    window.uploaded(second)
    decision = window.decide(2.0, ALONE)
    assert decision.contributions == (second,)
    assert window.offer(third, 3.0) == Held(), "it was lost with an owner that does not end the merge"


def test_an_attempt_that_came_just_before_the_deadline_is_for_the_next_one() -> None:
    """Its upload had no time yet: refusing it would lose its training. What had all its time is refused."""
    window = Window(samples.head(), FORMAT, 0.0)
    outdone, late, idle = attempts("l0", "l0", "l1")
    for offer in (outdone, idle):
        window.offer(offer, 0.0)
    window.decide(0.0, ALONE)
    assert window.offer(late, 29.9) == Accepted(replaced=outdone)
    decision = window.decide(30.0, ALONE)
    assert decision == Reopened((idle,), "0 of quorum 1 uploaded in time", 0.0, ("l0", "l1"))
    assert window.member_offers() == (late,)
    assert isinstance(window.decide(30.0, ALONE), Wait)
    window.uploaded(late)
    again = window.decide(31.0, ALONE)
    assert again.contributions == (late,)


def test_an_attempt_that_took_a_place_is_refused_once_it_has_had_the_whole_time_itself() -> None:
    """As its owner asks late, or gave more time to what comes."""
    window = Window(samples.head(), FORMAT, 0.0)
    for offer, now in zip(attempts("l0", "l0"), (5.0, 25.0), strict=True):
        window.offer(offer, now)
        window.decide(now, ALONE)
    decision = window.decide(55.0, ALONE)
    assert isinstance(decision, Reopened)
    assert [offer.entry_id for offer in decision.overdue] == ["2-0"]
    assert window.pending() == ()


def test_a_merge_tells_when_the_window_opened_when_k_were_in_and_when_it_was_fixed() -> None:
    """The grace window is estimated from these; more time for uploads moves none of them."""
    window = Window(samples.head(), FORMAT, 0.0)
    offers = attempts("l0", "l1")
    given = replace(ALONE, quorum=2, expected=frozenset({"l0", "l1", "l2"}), grace_s=5.0)
    for now, offer in ((1.0, offers[0]), (3.0, offers[1])):
        window.offer(offer, now)
        window.decide(now, given)
    assert window.decide(9.0, given) == Wait(39.0, "0 of 2 uploaded, waiting for l0, l1")
    assert window.decide(39.0, replace(given, arriving=frozenset({"1-0", "2-0"}))) == Wait(
        69.0, "0 of 2 uploaded, waiting for l0, l1"
    )
    for offer in offers:
        window.uploaded(offer)
    decision = window.decide(40.0, given)
    assert (decision.opened_at, decision.quorum_at, decision.fixed_at) == (1.0, 3.0, 9.0)
    assert (decision.quorum_s, decision.grace_s) == (2.0, 6.0)
    assert decision.reason == "2 in, without l2"


def test_with_a_quorum_the_merge_goes_on_without_it_and_it_waits_for_the_next_window() -> None:
    """It is pending then: neither merged, nor overdue, nor forgotten."""
    window = Window(samples.head(), FORMAT, 0.0)
    outdone, late, whole = attempts("l0", "l0", "l1")
    for offer in (outdone, whole):
        window.offer(offer, 0.0)
    window.uploaded(whole)
    window.decide(0.0, ALONE)
    window.offer(late, 29.9)
    decision = window.decide(30.0, ALONE)
    assert (decision.contributions, decision.overdue, window.held.offers) == ((whole,), (), (late,))
    assert decision.in_vain == ("l0",), "it was waited for, whatever it has announced since"
    assert decision.reason == "1 in, without l0"
    window.refused(late)
    assert window.held.offers == (), "a delta that was refused meanwhile came again"


def test_below_the_quorum_what_comes_is_waited_for_though_members_have_renewed_theirs() -> None:
    """To open it again would ask all of them once more, for nothing: what they renewed waits for the next window."""
    window = Window(samples.head(), FORMAT, 0.0)
    slow, whole, renewed = attempts("l0", "l1", "l1")
    for offer in (slow, whole):
        window.offer(offer, 0.0)
    both = replace(ALONE, quorum=2, arriving=frozenset({slow.entry_id}))
    window.decide(0.0, both)
    window.uploaded(whole)
    assert window.offer(renewed, 1.0) == Held()
    assert window.decide(30.0, both) == Wait(60.0, "1 of 2 uploaded, waiting for l0")


def test_what_one_learner_leaves_for_the_next_window_is_bounded() -> None:
    """Of one training the newest attempt; of many restarts so many, and the rest is refused as a flood."""
    window = Window(samples.head(), FORMAT, 0.0)
    window.offer(Offer("1-0", samples.header("l0")), 0.0)
    window.uploaded(window.member_offers()[0])
    window.decide(0.0, ALONE)
    one, two = (Offer(f"{n}-0", samples.header("l1", attempt=n)) for n in (2, 3))
    assert window.offer(one, 1.0) == Held()
    assert window.offer(two, 1.0) == Held(replaced=one)
    answers = [window.offer(Offer(f"{n}-0", samples.header("l1", incarnation=f"{n:08x}")), 1.0) for n in range(10, 100)]
    refused = [a.reason for a in answers if isinstance(a, Refused)]
    assert len(window.held.offers) == HELD_A_LEARNER
    assert refused == [RefusalReason.FLOOD] * (90 - HELD_A_LEARNER + 1)


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=50, stateful_step_count=40)
