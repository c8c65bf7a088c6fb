"""The table in the docstring of rounds is what they do: each row is read, and tried in each of its states.

A row without a case here fails, and so does a case without a row: prose and code cannot drift apart.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from diloco.pipeline.fragments import layout_of
from diloco.workers import rounds as module
from diloco.workers.rounds import MIN_RENEWED, Base, OpenWindow, Publication, Rounds, State
from tests.virtual_run import spec_of, sync_spec

H, VERSION = 4, 3


class Row(NamedTuple):
    """One line of the table, for one of its states."""

    state: State
    event: str
    guard: str
    next: State
    published: str


def rows() -> list[Row]:
    """The table, a row for each state that it names; "any" and "unchanged" are spelled out."""
    found = []
    for line in re.findall(r"^\| (?!state )(.+) \|$", module.__doc__ or "", re.MULTILINE):
        states, event, guard, after, published = (cell.strip() for cell in line.split("|"))
        among = list(State) if states == "any" else [State[name] for name in states.split(" or ")]
        found += [
            Row(state, event, guard, state if after == "unchanged" else State[after], published) for state in among
        ]
    return found


def rounds_in(state: State) -> Rounds:
    """Of one fragment, in a later round than the first."""
    sync = sync_spec(fragments=1, sync_interval=H)
    rounds = Rounds(layout_of(spec_of(sync).tensors), sync)
    if state is not State.NO_BASE:
        adopt(rounds, VERSION - 1)
        adopt(rounds, VERSION)
    if state in (State.DUE, State.PUBLISHED, State.AGAIN):
        steps(rounds, H)
    if state in (State.PUBLISHED, State.AGAIN):
        assert len(list(rounds.publications({}))) == 1
    if state is State.AGAIN:
        rounds.offer_again()
    assert state_of(rounds) is state
    return rounds


def state_of(rounds: Rounds) -> State:
    return rounds._fragments[0].state


def adopt(rounds: Rounds, version: int = VERSION + 1) -> list[Publication]:
    rounds.adopt(Base(0, version, bytes(16), np.zeros(7, np.float32)))
    return []


def steps(rounds: Rounds, count: int, tokens: int = 10) -> list[Publication]:
    for _ in range(count):
        rounds.trained(tokens)
    return []


def not_copied(rounds: Rounds) -> list[Publication]:
    f = rounds._fragments[0]
    assert f.base is not None
    rounds.not_copied(Publication(f.base, 0, rounds.deltas, f.steps, f.tokens, due=True))
    return []


def offered_again(rounds: Rounds) -> list[Publication]:
    rounds.offer_again()
    return []


def after(rounds: Rounds, window: OpenWindow | None = None, count: int = 1, tokens: int = 10) -> list[Publication]:
    """What is published after so many steps, if no delta is on the bus."""
    steps(rounds, count, tokens)
    return list(rounds.publications({} if window is None else {0: window}))


def uploaded(rounds: Rounds, count: int) -> list[Publication]:
    """The same, if the delta is on the bus."""
    steps(rounds, count)
    return list(rounds.publications({}, {0: rounds.deltas}))


def without_room(rounds: Rounds) -> list[Publication]:
    """Snapshots of earlier deltas are still held."""
    rounds._room, rounds._held = 0, {-serial: 0 for serial in range(module.AT_ONCE)}
    return list(rounds.publications({}, {}, {0: -module.AT_ONCE}))


def left(rounds: Rounds, window: OpenWindow | None = None, drains: bool = False) -> list[Publication]:
    return list(rounds.last({} if window is None else {0: window}, due=drains))


def left_early(rounds: Rounds, drains: bool = False) -> list[Publication]:
    steps(rounds, 1)
    return left(rounds, drains=drains)


OPEN, REOPENED = OpenWindow(VERSION, 0, member=False), OpenWindow(VERSION, 1, member=False)

CASES: dict[tuple[str, str], Callable[[Rounds], list[Publication]]] = {
    ("adopt", ""): adopt,
    ("trained", ""): lambda rounds: steps(rounds, 1),
    ("trained", "fewer than H steps on the base"): lambda rounds: steps(rounds, H - 1),
    ("trained", "H steps, without a token"): lambda rounds: steps(rounds, H, tokens=0),
    ("trained", "H steps"): lambda rounds: steps(rounds, H),
    ("publications", "a window is open"): lambda rounds: after(rounds, OPEN),
    ("publications", "a window is open, no token yet"): lambda rounds: after(rounds, OPEN, tokens=0),
    ("publications", "no window, another version's, or it has this learner's delta"): lambda rounds: [
        *after(rounds, None),
        *after(rounds, OpenWindow(VERSION - 1, 0, member=False)),
        *after(rounds, OpenWindow(VERSION, 0, member=True)),
    ],
    ("publications", "there is room"): lambda rounds: list(rounds.publications({}, {}, {})),
    ("publications", "there is no room"): without_room,
    ("publications", "on the bus"): lambda rounds: uploaded(rounds, MIN_RENEWED - 1),
    ("publications", "on the bus, and enough was trained since"): lambda rounds: uploaded(rounds, MIN_RENEWED),
    ("publications", "on its way, and enough was trained since"): lambda rounds: after(rounds, None, MIN_RENEWED),
    ("publications", "the window reopened without it"): lambda rounds: after(rounds, REOPENED),
    ("not_copied", ""): not_copied,
    ("offer_again", ""): offered_again,
    ("last", ""): left_early,
    ("last", "no token"): left,
    ("last", "the run drains"): lambda rounds: left_early(rounds, drains=True),
    ("last", "the window reopened without it"): lambda rounds: left(rounds, REOPENED),
}


def kind(publication: Publication) -> str:
    """In the table's words."""
    if publication.renews:
        assert publication.attempt, "a renewal is a later attempt"
        return "a renewal"
    if publication.attempt:
        return "the next attempt"
    return "a delta that is due" if publication.due else "a delta that follows"


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    """So that neither is forgotten when the other changes."""
    assert {(row.event, row.guard) for row in rows()} == set(CASES)
    assert {row.state for row in rows()} == set(State)
    assert {row.next for row in rows()} == set(State)
    assert {(row.state, row.event) for row in rows()} == {
        (State.PUBLISHED, "not_copied"),
        *((state, event) for state in State for event in ("adopt", "trained", "publications", "offer_again", "last")),
    }


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.state.name}-{row.event}-{row.guard}")
def test_a_fragment_does_what_the_table_says(row: Row) -> None:
    """From the state, by the event, under the guard: to the next state; and what is published on the way."""
    rounds = rounds_in(row.state)
    serial = rounds.deltas
    published = CASES[row.event, row.guard](rounds)
    assert state_of(rounds) is row.next
    assert [kind(one) for one in published] == ([] if row.published == "nothing" else [row.published])
    assert [one.serial for one in published] == [serial + 1] * len(published)
    assert [one.renews for one in published] == [serial * (row.published == "a renewal")] * len(published)
