"""Measured values beside their bounds: what holds, what does not, and what was not measured."""

import copy
from typing import Any

from diloco_studies.strikes.bounds import bounds_of, lines, table

REPORT: dict[str, Any] = {
    "settings": {"pace": 0.0, "syncers": 2},
    "gaps_by_strike": {
        "any_fragment": {
            "kill learner": {"longest_s": 9.0, "alone_s": 3.0},
            "kill syncer": {"longest_s": 12.0, "alone_s": None},
            "kill redis": {"longest_s": 4.0, "alone_s": 4.0},
        }
    },
    "yardsticks": {"after_a_learner_s": 4.0, "after_a_syncer_s": 11.0},
    "step_rates": {"syncer": {"outages": 2, "ratio": 0.98}, "redis": {"outages": 1, "ratio": 0.5}},
    "timeline": {"strikes": [{"kind": "kill syncer", "length_s": 10.0}, {"kind": "kill redis", "length_s": 8.0}]},
    "blocked_share": 0.004,
    "global_val_loss": 2.02,
    "ledger": {"merged": 900},
}
PARTIES = ("syncer", "redis")


def rows(**given: Any) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in bounds_of(copy.deepcopy(REPORT) | given)}


def test_a_gap_is_judged_where_no_other_strike_was_under_way() -> None:
    found = rows()
    after_learner = found["longest time without a commit after `kill learner`"]
    assert (after_learner["measured"], after_learner["bound"], after_learner["holds"]) == (3.0, 4.0, True)
    assert "9.0 s where strikes of other kinds" in after_learner["note"]
    after_syncer = found["longest time without a commit after `kill syncer`"]
    assert (after_syncer["measured"], after_syncer["holds"]) == (None, None)
    assert not any("redis" in what for what in found), "there is no bound for a Redis that is away"


def test_nobody_can_stand_in_for_the_only_syncer_so_its_absence_is_part_of_the_bound() -> None:
    after_syncer = rows(settings={"pace": 0.0, "syncers": 1})["longest time without a commit after `kill syncer`"]
    assert after_syncer["bound"] == 11.0 + 10.0
    assert "10.0 s for which the only syncer was away" in after_syncer["note"]


def test_step_rates_are_judged_on_paced_runs_and_waiting_on_the_others() -> None:
    assert [row["holds"] for what, row in rows().items() if "waited for the library" in what] == [True]
    assert [row["holds"] for what, row in rows(blocked_share=0.02).items() if "waited" in what] == [False]
    paced = rows(settings={"pace": 0.2, "syncers": 2})
    assert not any("waited" in what for what in paced)
    syncer, redis = (paced[f"step rate of paced learners during outages of {party} / before"] for party in PARTIES)
    assert (syncer["holds"], redis["holds"]) == (True, False)
    assert "longest strike 10.0 s" in syncer["note"]


def test_the_loss_is_judged_against_the_same_run_undisturbed() -> None:
    what = "final loss / that of the same run undisturbed"
    assert what not in rows()
    other = {"global_val_loss": 2.0, "ledger": {"merged": 910}}
    row = rows(undisturbed=other)[what]
    assert (round(row["measured"], 4), row["holds"]) == (1.01, True)
    assert "900 merged tokens; undisturbed 2.0000 at 910" in row["note"]
    assert rows(undisturbed=other | {"global_val_loss": 1.9})[what]["holds"] is False
    assert rows(undisturbed=other | {"global_val_loss": None})[what]["holds"] is None


def test_every_row_is_shown_with_whether_it_holds() -> None:
    found = bounds_of(REPORT | {"blocked_share": 0.5})
    assert [line.rsplit(" (", 1)[0].rsplit(": ", 1)[1] for line in lines(found)] == [
        "holds",
        "not measured",
        "outside the usual bound, which is information and not part of the verdict",
    ]
    assert "| 50.00 % | most | 1.00 % | **no** |" in "\n".join(table(found))
