"""Which headers a head refuses, why and with how many tokens; and how many learners a window and the next one take."""

from dataclasses import replace
from typing import Any

import pytest

from diloco.pipeline.messages.fragment import MergedBase, RefusalReason
from diloco.pipeline.messages.wire import MAX_MEMBERS
from diloco.syncer.admission import Accepted, Admission, DeltaFormat, Held, NextWindow, Offer, Refused
from diloco.syncer.window import Window
from tests import samples

FORMAT = DeltaFormat(bytes(16), "fp32", 3)
DIGESTS = {3: b"3" * 16, 4: b"4" * 16, 5: b"5" * 16, 6: b"6" * 16}
HEAD = samples.head(
    version=5,
    digest=DIGESTS[5],
    previous_digest=DIGESTS[4],
    merged=(MergedBase(learner="l0", incarnation="0" * 8, base_version=4, tokens=300),),
)
"""At version 5; l0's delta on version 4 was merged, with 300 tokens."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"steps": 1, "tokens": 1}, None),
        ({"learner": "l1", "base_version": 4}, None),
        ({"incarnation": "1" * 8, "base_version": 4}, None),
        (
            {"layout": b"x" * 16, "tokens": 0},
            (RefusalReason.WRONG_LAYOUT, "layout 78787878, fp32, 3 chunks; the run has 00000000, fp32, 3", 0),
        ),
        (
            {"codec": "bf16"},
            (RefusalReason.WRONG_LAYOUT, "layout 00000000, bf16, 3 chunks; the run has 00000000, fp32, 3", 400),
        ),
        ({"steps": 0}, (RefusalReason.NOT_POSITIVE, "steps=0 tokens=400", 400)),
        ({"tokens": 0}, (RefusalReason.NOT_POSITIVE, "steps=4 tokens=0", 0)),
        ({"base_version": 4}, (RefusalReason.ALREADY_MERGED, "base 4 was merged before", 100)),
        ({"base_version": 4, "tokens": 300}, (RefusalReason.ALREADY_MERGED, "base 4 was merged before", 0)),
        ({"base_version": 4, "tokens": 200}, (RefusalReason.ALREADY_MERGED, "base 4 was merged before", 0)),
        ({"base_version": 3}, (RefusalReason.ALREADY_MERGED, "base 4 was merged before", 400)),
        ({"learner": "l1", "base_version": 3}, (RefusalReason.TOO_STALE, "base 3, the head is at 5", 400)),
        ({"base_version": 6}, (RefusalReason.UNKNOWN_BASE, "base 6 36363636", 400)),
        ({"base_version": 6, "base_digest": DIGESTS[5]}, (RefusalReason.UNKNOWN_BASE, "base 6 35353535", 400)),
        ({"base_digest": DIGESTS[4]}, (RefusalReason.UNKNOWN_BASE, "base 5 34343434", 400)),
    ],
)
def test_a_head_refuses_what_can_not_be_merged_into_it(
    given: dict[str, Any], expected: tuple[RefusalReason, str, int] | None
) -> None:
    """Of what was merged in part, the rest is lost; of all else that is refused, all of it."""
    base = given.get("base_version", 5)
    header = samples.header(**{"base_version": base, "base_digest": DIGESTS[base], **given})
    assert Admission(HEAD, FORMAT).refusal(header) == (expected and Refused(*expected))


@pytest.mark.parametrize(("tokens", "lost"), [(300, 0), (401, 1), (900, 500)])
def test_of_an_earlier_attempt_what_it_has_beyond_the_later_one_is_lost(tokens: int, lost: int) -> None:
    """It is refused, in a window and for the next one; the tape tells the tokens."""
    window, later = Window(samples.head(), FORMAT, 0.0), NextWindow()
    for attempt, given, expected in ((1, 400, (Accepted(), Held())), (0, tokens, None)):
        offer = Offer(f"{attempt}-0", samples.header(attempt=attempt, tokens=given))
        answers = window.offer(offer, 0.0), later.hold(offer)
        detail = "a different delta on this base is already in the window"
        assert answers == (expected or (Refused(RefusalReason.DUPLICATE, detail, lost),) * 2)


def test_a_window_and_the_next_take_so_many_learners_as_a_head_has_room_for() -> None:
    """It keeps the bases of two merges. One learner more is refused as a flood, with what it trained."""
    offers = [Offer(f"{n}-0", samples.header(f"l{n}", tokens=7)) for n in range(MAX_MEMBERS + 1)]
    window, later = Window(samples.head(), FORMAT, 0.0), NextWindow()
    for offer in offers[:-1]:
        assert window.offer(offer, 0.0) == Accepted()
        assert later.hold(offer) == Held()
    refused = Refused(RefusalReason.FLOOD, f"the window already has {MAX_MEMBERS} learners", 7)
    assert window.offer(offers[-1], 0.0) == refused
    assert later.hold(offers[-1]) == replace(refused, detail="too many deltas are waiting for the next window")
