"""The table in the window's docstring is what the window does: each row is read, and tried in each of its states.

A row without a case here fails, and so does a case without a row: prose and code cannot drift apart.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from diloco.syncer import window as module
from diloco.syncer.admission import Accepted, DeltaFormat, Held, Offer, Refused
from diloco.syncer.window import Conditions, Merge, Reopened, State, Wait, Window
from tests import samples

VERSION, FORMAT = 1, DeltaFormat(bytes(16), "fp32", 3)
GRACE_S, UPLOAD_S = 5.0, 10.0
TWO, THREE = frozenset({"l0", "l1"}), frozenset({"l0", "l1", "l2"})


class Row(NamedTuple):
    """One line of the table, for one of its states."""

    state: State
    event: str
    guard: str
    next: State
    attempts: int
    """By how many the attempt rises."""
    result: str


def rows() -> list[Row]:
    """The table, a row for each state that it names; "any" and "unchanged" are spelled out."""
    lines = re.findall(r"^\| (.+) \|$", module.__doc__ or "", re.MULTILINE)
    found = []
    for line in lines:
        states, event, guard, after, result = line.split(" | ")
        if states == "state":
            continue
        among = list(State) if states == "any" else [State[name] for name in states.split(" or ")]
        name, _, attempt = after.partition(", ")
        assert attempt in ("", "attempt + 1"), line
        for state in among:
            becomes = state if name == "unchanged" else State[name]
            found.append(Row(state, event, guard, becomes, int(bool(attempt)), result))
    return found


def delta(learner: str, **given: Any) -> Offer:
    """A due delta on the current base, unless told otherwise; one of the same content is the same delta."""
    header = samples.header(learner, **{"base_version": VERSION, "base_digest": b"1" * 16, **given})
    return Offer(f"{header.incarnation}.{header.serial}@{learner}", header)


def given(
    quorum: int = 2,
    expected: frozenset[str] = TWO,
    draining: bool = False,
    arriving: frozenset[str] = frozenset(),
    suspected: frozenset[str] = frozenset(),
) -> Conditions:
    return Conditions(
        quorum,
        expected,
        len(expected),
        GRACE_S,
        UPLOAD_S,
        draining,
        arriving=arriving,
        suspected=suspected,
    )


L0, L1, L2 = delta("l0"), delta("l1"), delta("l2")
LATER = delta("l1", attempt=1)
STALE = delta("l1", base_version=0, base_digest=b"0" * 16)


def fresh() -> Window:
    head = samples.head(version=VERSION, digest=b"1" * 16, previous_digest=b"0" * 16)
    return Window(head, FORMAT, 0.0)


def window_in(state: State, l1: Offer) -> Window:
    """At time 0; K = 2. l0 is in, and l1 from GRACE on; both are uploaded in MERGING."""
    window = fresh()
    if state is not State.IDLE:
        window.offer(L0, 0.0)
        window.decide(0.0, given())
    if state in (State.GRACE, State.UPLOADING, State.MERGING):
        window.offer(l1, 0.0)
        window.decide(0.0, given(expected=THREE if state is State.GRACE else TWO))
    if state is State.MERGING:
        uploaded(window, L0, l1).decide(0.0, given())
    assert window.state is state
    return window


def with_l1(window: Window) -> Window:
    if "l1" not in window.members:
        window.offer(L1, 0.0)
    return window


def uploaded(window: Window, *offers: Offer) -> Window:
    for offer in offers:
        window.uploaded(offer)
    return window


def without(window: Window, offer: Offer) -> Window:
    window.refused(offer)
    return window


def refused_ones() -> list[Offer]:
    """Whatever the state, each of these is refused: one of each kind that the row names."""
    return [
        delta("l9", base_version=VERSION + 1),
        delta("l9", base_digest=b"x" * 16),
        delta("l9", layout=b"x" * 16),
        delta("l9", chunks=4),
        delta("l9", steps=0),
        delta("l9", tokens=-1),
    ]


def refused_each(window: Window) -> Any:
    answers = [window.offer(offer, 1.0) for offer in refused_ones()]
    assert all(isinstance(answer, Refused) for answer in answers)
    return answers[-1]


def not_merged(window: Window) -> None:
    window.not_merged(window.phase.merge)
    assert not window.members


def left_and_came_back(window: Window) -> Any:
    window.offer(delta("l0", due=False), 1.0)
    return window.offer(delta("l0", incarnation="f" * 8), 1.0)


def refused_and_next(window: Window) -> Any:
    left_and_came_back(window)
    without(window, delta("l0", due=False))
    (awaited,) = window.not_uploaded()
    assert (awaited.header.incarnation, window.held.offers) == ("f" * 8, ())
    return window.decide(1.0, given(suspected=frozenset({"l0"})))


CASES: dict[tuple[str, str], Callable[[Window], Any]] = {
    ("offer", "stale by one"): lambda w: w.offer(delta("l0", base_version=0, base_digest=b"0" * 16), 1.0),
    ("offer", "a new incarnation of a member"): left_and_came_back,
    ("offer", "another learner"): lambda w: w.offer(L2, 1.0),
    ("offer", "a later attempt of a member that has not uploaded"): lambda w: w.offer(LATER, 1.0),
    ("offer", "a later attempt of a member that has uploaded"): lambda w: uploaded(with_l1(w), L1).offer(LATER, 1.0),
    ("offer", "a member's on a later base"): lambda w: (w.offer(STALE, 1.0), w.offer(L1, 1.0))[1],
    ("offer", "unknown base, wrong layout, not positive"): refused_each,
    ("offer", "seen"): lambda w: w.offer(L0, 1.0),
    ("decide", "nothing due"): lambda w: (w.offer(delta("l0", due=False), 1.0), w.decide(1.0, given()))[1],
    ("decide", "one is due, also of a new incarnation"): lambda w: (
        left_and_came_back(w),
        w.decide(1.0, given()),
    )[1],
    ("decide", "a suspected learner's is due, its earlier incarnation's is uploaded"): lambda w: (
        left_and_came_back(w),
        uploaded(w, delta("l0", due=False)).decide(1.0, given(suspected=frozenset({"l0"}))),
    )[1],
    ("decide", "a suspected learner's earlier incarnation's is refused, its next is due"): refused_and_next,
    ("decide", "a suspected learner's is due, and not uploaded"): lambda w: (
        w.offer(L1, 1.0),
        w.decide(1.0, given(suspected=frozenset({"l1"}))),
    )[1],
    ("decide", "a suspected learner's is due and uploaded"): lambda w: (
        w.offer(L1, 1.0),
        uploaded(w, L1).decide(1.0, given(suspected=frozenset({"l1"}))),
    )[1],
    ("decide", "draining, K members, none due"): lambda w: (
        w.offer(delta("l0", due=False), 1.0),
        w.offer(delta("l1", due=False), 1.0),
        w.decide(1.0, given(draining=True)),
    )[2],
    ("decide", "fewer than K in"): lambda w: w.decide(1.0, given()),
    ("decide", "K in, one of them suspected"): lambda w: with_l1(w).decide(1.0, given(suspected=frozenset({"l1"}))),
    ("decide", "fewer than K in, and one was refused"): lambda w: without(w, L0).decide(1.0, given()),
    ("decide", "fewer than K in, and a suspected one was refused"): lambda w: without(with_l1(w), L1).decide(
        1.0, given(suspected=frozenset({"l1"}))
    ),
    ("decide", "fewer than K in, a suspected one refused, its next held"): lambda w: (
        with_l1(w).offer(delta("l1", incarnation="f" * 8), 1.0),
        without(w, L1).decide(1.0, given(suspected=frozenset({"l1"}))),
    )[1],
    ("decide", "K in, others expected, grace > 0"): lambda w: with_l1(w).decide(1.0, given(expected=THREE)),
    ("decide", "K in, and all expected"): lambda w: with_l1(w).decide(1.0, given()),
    ("decide", "others expected, the grace is over"): lambda w: w.decide(GRACE_S, given(expected=THREE)),
    ("decide", "others expected, the grace goes on"): lambda w: w.decide(1.0, given(expected=THREE)),
    ("decide", "too few are left for K"): lambda w: without(w, L1).decide(1.0, given()),
    ("decide", "uploads are missing before the deadline"): lambda w: uploaded(w, L0).decide(1.0, given()),
    ("decide", "all of M_t uploaded"): lambda w: uploaded(w, L0, L1).decide(1.0, given()),
    ("decide", "the deadline, at least K uploaded"): lambda w: uploaded(w, L0).decide(UPLOAD_S, given(quorum=1)),
    ("decide", "the deadline, fewer than K uploaded"): lambda w: uploaded(w, L0).decide(UPLOAD_S, given()),
    ("decide", "the deadline, at least K uploaded, what is missing comes"): lambda w: uploaded(w, L0).decide(
        UPLOAD_S, given(quorum=1, arriving=frozenset({L1.entry_id}))
    ),
    ("decide", "the deadline, fewer than K uploaded, what is missing comes"): lambda w: uploaded(w, L0).decide(
        UPLOAD_S, given(arriving=frozenset({L1.entry_id}))
    ),
    ("decide", "the deadline, uploads come, another's held"): lambda w: (
        w.offer(L2, 1.0),
        uploaded(w, L0).decide(UPLOAD_S, given(arriving=frozenset({L1.entry_id}))),
    )[1],
    ("decide", "whatever has changed"): lambda w: w.decide(99.0, given(quorum=7, expected=THREE)),
    ("not_merged", "the outcome is not finite"): not_merged,
}

RESULTS: dict[str, Callable[[Any, float], bool]] = {
    "Accepted": lambda answer, _: isinstance(answer, Accepted),
    "Held": lambda answer, _: isinstance(answer, Held),
    "Refused": lambda answer, _: isinstance(answer, Refused),
    "Merge": lambda answer, _: isinstance(answer, Merge),
    "Reopened": lambda answer, _: isinstance(answer, Reopened) and answer.opened_at == 0.0,
    "Merge(one in vain)": lambda answer, _: (
        isinstance(answer, Merge) and (answer.in_vain, answer.overdue) == (("l1",), ())
    ),
    "Reopened(one in vain)": lambda answer, _: (
        isinstance(answer, Reopened) and (answer.in_vain, answer.overdue) == (("l1",), ())
    ),
    "Wait(another deadline)": lambda answer, _: isinstance(answer, Wait) and answer.until == 2 * UPLOAD_S,
    "Wait(no deadline)": lambda answer, _: isinstance(answer, Wait) and answer.until is None,
    "Wait(grace deadline)": lambda answer, since: isinstance(answer, Wait) and answer.until == since + GRACE_S,
    "Wait(upload deadline)": lambda answer, since: isinstance(answer, Wait) and answer.until == since + UPLOAD_S,
    "nothing": lambda answer, _: answer is None,
}

REASONS: dict[str, str] = {
    "nothing due": "no delta asks for a merge, 1 waiting",
    "fewer than K in, and one was refused": "0 of quorum 2 left after a refusal",
    "others expected, the grace goes on": "grace: 2 in, waiting for l2",
    "too few are left for K": "1 of quorum 2 left",
    "uploads are missing before the deadline": "1 of 2 uploaded, waiting for l1",
    "all of M_t uploaded": "all 2 expected learners are in",
    "the deadline, at least K uploaded": "1 in, without l1",
    "the deadline, fewer than K uploaded": "1 of quorum 2 uploaded in time",
}
"""What decisions give as their reasons: pages and the tape show them."""


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    """So that neither is forgotten when the other changes."""
    assert {(row.event, row.guard) for row in rows()} == set(CASES)
    assert {row.result for row in rows()} == set(RESULTS)
    assert {row.guard for row in rows()} >= set(REASONS)
    assert {row.state for row in rows()} == {row.next for row in rows()} == set(State)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.state.name}-{row.event}-{row.guard}")
def test_the_window_does_what_its_table_says(row: Row) -> None:
    """From the state, by the event, under the guard: to the next state, with the result."""
    window = window_in(row.state, STALE if row.guard == "a member's on a later base" else L1)
    attempt = window.attempt
    answer = CASES[row.event, row.guard](window)
    assert window.state is row.next
    assert window.attempt == attempt + row.attempts
    now = GRACE_S if "is over" in row.guard else 1.0
    since = 0.0 if row.state is row.next else now  # a state that goes on keeps its deadline
    assert RESULTS[row.result](answer, since), answer
    assert row.guard not in REASONS or answer.reason == REASONS[row.guard]
    if isinstance(answer, Reopened):
        assert not isinstance(window.decide(UPLOAD_S, given()), Reopened), "said twice"
