import io
from typing import Any

import pytest
from rich.console import Console

from diloco.launcher.display import (
    Screen,
    compact_versions,
    cost_words,
    goodput_words,
    merged_share,
    plain_line,
    render,
    time_left,
)
from diloco.pipeline.units import count, duration


def learner(name: str, **changes: Any) -> dict[str, Any]:
    fields = {
        "id": name,
        "incarnation": "ab12cd34",
        "live": True,
        "left": False,
        "step": 410,
        "tokens": 400_000,
        "tokens_per_s": 5000.0,
        "loss": 2.3412,
        "step_s": 0.19,
        "step_s_median": 0.19,
        "blocked_s": 0.1,
        "wall_s": 80.0,
        "versions": [13, 12],
        "age_s": 0.2,
        "host": "here",
        "device": "cpu",
    }
    return fields | changes


def fragment(p: int, **window: Any) -> dict[str, Any]:
    idle = {
        "state": "idle",
        "attempt": 0,
        "members": [],
        "expected": 4,
        "quorum": 3,
        "reason": "",
        "deadline_in_s": None,
    }
    totals = {"digest": "aa", "merged_deltas": 50, "merged_tokens": 300_000, "rejected_tokens": 0}
    return {"id": p, "version": 13, "interval": 24, "asked_interval": 24, "window": idle | window} | totals


GOODPUT: dict[str, Any] = {
    "since_start": {
        "seconds": {"training": 170.0, "blocked": 0.0, "joining": 0.0, "rejoining": 10.0, "away": 20.0},
        "goodput": 0.775,
        "badput": {"blocked": 0.0, "joining": 0.0, "rejoining": 0.05, "away": 0.1, "died": 0.075},
    },
    "recent": {"seconds": {}, "goodput": 0.9, "badput": {"not_merged": 0.1}},
    "merged_tokens": 1_500_000,
}


def status(**changes: Any) -> dict[str, Any]:
    fields = {
        "run": "my-run",
        "own_loop": False,
        "phase": "running",
        "reason": "training",
        "tokens": 1_620_000,
        "budget_tokens": 2_500_000,
        "progress": 0.648,
        "merged_tokens": 1_500_000,
        "merged_share": {
            "since_start": 0.926,
            "pending": 0.049,
            "recent": 0.97,
            "recent_s": 305.0,
            "recent_is_all": False,
        },
        "goodput": GOODPUT,
        "outer_steps": 104,
        "tokens_lost": {"overwritten": 21_000, "rejected": 0, "died": 3000, "pending": 80_000},
        "elapsed_s": 81.0,
        "learners": [learner("learner-0"), learner("learner-1", step=398)],
        "syncers": [{"id": "syncer", "leads": True, "fragments": [0, 1]}],
        "refused": {},
        "fragments": [
            fragment(0, state="grace", members=["learner-0", "learner-1", "learner-2"], deadline_in_s=0.21),
            fragment(1, state="collecting", members=["learner-3"]),
        ],
        "evaluation": {"loss": 2.1874, "tokens": 1_500_000, "elapsed_s": 78.0, "final": False},
        "outer_step": None,
        "warnings": ["quorum 3 > 2 live"],
    }
    return fields | changes


def text_of(shown: dict[str, Any], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(shown))
    return console.file.getvalue()  # type: ignore[attr-defined]


def line_with(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def test_each_learner_has_a_line_with_step_speed_loss_and_versions():
    shown = line_with(text_of(status()), "learner-1")
    for part in ("398", "5000", "2.3412", "12-13", "live"):
        assert part in shown


def test_each_window_shows_its_learners_the_quorum_and_the_grace_left():
    text = text_of(status())
    grace = line_with(text, "grace  ")
    assert "3 / 3" in grace
    assert "0.2 s" in grace
    assert "1 / 3" in line_with(text, "collecting")


def test_an_interval_longer_than_asked_for_says_so():
    long = [fragment(0) | {"interval": 72}, fragment(1)]
    text = text_of(status(fragments=long), 160)
    assert text.count("72 (asked: 24)") == text.count("asked") == 1


def test_the_outer_step_stands_beside_the_room_that_it_has():
    """Of which more than 100 % means that it does not fit; before it is known nothing is said."""
    known = status(outer_step={"outer_s": 2.58, "room_s": 2.0, "share": 1.29})
    for text in (text_of(known), plain_line(known)):
        assert "outer step 2.6 s, 129% of its budget" in " ".join(text.split())
    assert "of its budget" not in text_of(status()) + plain_line(status())


def test_a_restarted_learner_shows_its_newest_incarnation_only():
    old = learner("learner-1", live=False, age_s=30.0, step=100)
    new = learner("learner-1", incarnation="ffff0000", age_s=0.1, step=7)
    text = text_of(status(learners=[old, new]))
    assert text.count("learner-1") == 1
    assert "7 " in line_with(text, "learner-1")


def test_ranks_are_shown_where_a_learner_has_several():
    text = text_of(status(learners=[learner("learner-0", ranks=1), learner("learner-1", ranks=8)]))
    assert "ranks" in text
    assert line_with(text, "learner-1").split()[2] == "8"
    assert "ranks" not in text_of(status(learners=[learner("learner-0", ranks=1), learner("learner-1")]))


def test_a_learner_that_went_silent_is_called_silent():
    text = text_of(status(learners=[learner("learner-1", live=False, age_s=12.0)]))
    assert "silent for 12 s" in text


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_on_a_narrow_terminal_less_is_shown_but_versions_and_windows_whole(width):
    """What is left out is what matters least; a long name and a long state take several lines."""
    long = learner("ip-10-11-12-13.compute.internal-31313", versions=[1312, 1298])
    shown = status(learners=[learner("learner-0"), long, learner("learner-2", live=False, age_s=130.0)])
    shown["fragments"][0]["version"] = 1312
    text = text_of(shown, width)
    for part in ("versions", "12-13", "1298-1312", "silent", "version", "1312", "window", "grace", "collecting"):
        assert part in text
    told = ("my-run: running", "21.0k overwritten, 0 rejected, 3000 died", "quorum 3 > 2 live")
    for part in (*told, "3 / 3", "104", "2.1874", "1:21 elapsed", "1:28 left", "1.62M of 2.50M tokens"):
        assert part in " ".join(text.replace("│", "").split())
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert ("inner step" in text) == (width > 60)


def test_before_a_run_is_agreed_on_nothing_is_of_a_budget_of_0():
    empty = status(phase="waiting", tokens=0, budget_tokens=0, progress=0.0, learners=[], fragments=[], evaluation=None)
    for text in (plain_line(empty), text_of(empty, 200)):
        assert "no tokens yet" in text
        assert "0 of 0" not in text
    assert "global validation loss - (no evaluator yet)" in text_of(empty, 200)
    assert "1000 tokens, budget not known yet" in plain_line(status(tokens=1000, budget_tokens=0))


def test_a_learner_that_came_back_is_one_learner():
    """It is back within the liveness time: the life before still looks live, and does not count beside the new one."""
    before = learner("learner-1", age_s=3.0)
    back = status(learners=[learner("learner-0"), before, learner("learner-1", incarnation="f" * 8, tokens_per_s=4000)])
    assert "2 learners live at 9000 tokens/s" in plain_line(back)
    assert time_left(back) == pytest.approx(880_000 / 9000)


def test_names_are_shown_as_they_are_even_if_they_look_like_markup():
    assert "[red]x" in text_of(status(run="[red]x"))


def test_the_plain_line_says_it_all_in_one_line():
    line = plain_line(status())
    assert "\n" not in line
    for part in ("running 65%", "1.62M of 2.50M", "2 learners live at 10.0k tokens/s", "2.1874", "1:28 left", "quorum"):
        assert part in line


def test_the_merged_share_is_shown_with_what_is_pending_and_that_of_the_last_minutes():
    """A healthy young run has much pending, and is not taken for a bad one."""
    assert "merged 93% (5% pending, 97% in the last 5:05)" in plain_line(status())
    assert "93% (5% pending, 97% in the last 5:05)" in text_of(status(), 200)
    young = {"since_start": 0.0, "pending": 0.98, "recent": None, "recent_s": 9.0}
    assert merged_share(young) == "0% (98% pending)"
    whole = {"since_start": 0.85, "pending": 0.0, "recent": 0.85, "recent_s": 54.0, "recent_is_all": True}
    assert merged_share(whole) == "85%", "it is not said twice"
    assert merged_share(whole | {"recent_is_all": False}) == "85% (85% in the last 0:54)"
    assert merged_share({"since_start": None, "pending": None, "recent": None, "recent_s": 0.0}) == "-"


def test_time_left_needs_somebody_who_trains():
    assert time_left(status()) == pytest.approx(88.0)
    assert time_left(status(learners=[learner("a", live=False)])) is None


def test_a_learner_that_claims_no_speed_leaves_a_time_that_nobody_writes():
    """The smallest number above zero is a speed that a report may have."""
    slow = status(learners=[learner("a", tokens_per_s=5e-324)])
    assert "- left" in plain_line(slow)
    assert "- left" in text_of(slow)
    assert (duration(float("inf")), duration(float("nan")), duration(1e300)) == ("-", "-", "-")


def test_without_a_terminal_one_line_comes_every_ten_seconds(monkeypatch):
    now = 100.0
    monkeypatch.setattr("diloco.launcher.display.time.monotonic", lambda: now)
    output = io.StringIO()
    with Screen(Console(file=output, width=1000)) as screen:
        for now in (100.0, 105.0, 109.0, 110.0, 115.0):  # noqa: B007  # read by the lambda
            screen.show(status())
    assert len(output.getvalue().splitlines()) == 2


def test_a_terminal_gets_the_live_view_and_notes_stay_above_it():
    output = io.StringIO()
    with Screen(Console(file=output, force_terminal=True, width=100)) as screen:
        screen.show(status())
        screen.note("learner-1 killed")
    assert "my-run: running" in output.getvalue()
    assert "learner-1 killed" in output.getvalue()


@pytest.mark.parametrize(
    ("versions", "shown"), [([], "-"), ([-1, -1], "-"), ([3, 3], "3"), ([4, 2, 3], "2-4"), ([-1, 0], "0")]
)
def test_versions_are_compact(versions, shown):
    assert compact_versions(versions) == shown


def test_numbers_are_short():
    assert [count(n) for n in (0, 950, 9999, 12_345, 2_500_000, 3.2e9)] == [
        "0",
        "950",
        "9999",
        "12.3k",
        "2.50M",
        "3.20G",
    ]
    assert [duration(s) for s in (None, 5, 125, 3723)] == ["-", "0:05", "2:05", "1:02:03"]


def test_refused_deltas_are_shown_with_their_reasons():
    """On the screen and in the plain line; nothing is said while none was refused."""
    bad = status(refused={"absurd_norm": 4, "non_finite": 8})
    assert "refused 12 deltas (8 non_finite, 4 absurd_norm)" in plain_line(bad)
    assert "refused 12 deltas (8 non_finite, 4 absurd_norm)" in text_of(bad, 140)
    assert "refused" not in plain_line(status())


def test_several_syncers_are_counted_and_the_lead_is_named():
    """One syncer is not worth a word; while the lead's lease is free, nobody leads."""
    two = [{"id": "a", "leads": False, "fragments": [1]}, {"id": "b", "leads": True, "fragments": [0]}]
    assert "syncer" not in text_of(status()) + plain_line(status())
    assert "syncers 2, b leads" in plain_line(status(syncers=two))
    assert "syncers 2, b leads" in text_of(status(syncers=two), 140)
    two[1]["leads"] = False
    assert "syncers 2, nobody leads" in plain_line(status(syncers=two))


def test_goodput_and_what_it_costs_are_one_line_each():
    """The greatest cause first, and none that is nothing."""
    line = "77.5% (90.0% in the last 5:00), badput 10.0% away, 7.5% died, 5.0% rejoining"
    assert goodput_words(GOODPUT) == line
    assert line in text_of(status(), width=200)
    none = {"seconds": {}, "goodput": None, "badput": {}}
    assert goodput_words(GOODPUT | {"recent": none}) == line.replace(" (90.0% in the last 5:00)", "")
    assert goodput_words(GOODPUT | {"since_start": none}) == goodput_words(None) == "-"
    assert cost_words(GOODPUT, 360.0) == "20.00, 13.33 per million merged tokens; badput 4.50, of which failures 4.50"
    unmerged = "0.02; badput 0.0045, of which failures 0.0045"
    assert cost_words(GOODPUT | {"merged_tokens": 0}, 0.36) == unmerged
    assert cost_words(None, 1.0) == "not known"
