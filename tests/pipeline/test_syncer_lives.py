"""Promises about the syncers in the page's list of events: who died, came, and took over."""

from typing import Any

from diloco.pipeline.messages.fragment import Committed, Contribution
from diloco.pipeline.messages.run import Event, Phase
from diloco.pipeline.view.page.model import PageModel, Poll
from diloco.pipeline.view.status import build_status
from tests import samples


def merge(fragment: int, version: int, syncer: str, unix_s: float, incarnation: str = "0" * 8) -> Committed:
    part = Contribution(
        **{"learner": "l0", "incarnation": incarnation, "base_version": version - 1, "attempt": 0},
        **{"steps": 1, "tokens": 1, "weight": 1.0, "norm": 1.0},
    )
    return Committed(
        **{"fragment": fragment, "version": version, "digest": b"0" * 16, "base_digest": b"0" * 16},
        **{"contributions": (part,), "reason": "all in", "norm": 1.0, "syncer": syncer, "unix_s": unix_s},
        **{"quorum_s": 0.0, "grace_s": 0.0, "upload_s": 0.0, "merge_s": 0.0},
    )


class Watched:
    """A page of a run, and what it has said happened."""

    def __init__(self) -> None:
        self.model = PageModel("run")

    def see(self, now_s: float, *syncers: str, phase: Phase = Phase.RUNNING, **given: Any) -> list[str]:
        state = samples.run_state(phase=phase, reason="resumed from checkpoint-7")
        names = {str(n): name for n, name in enumerate(syncers)}
        status = build_status("run", samples.spec(), state, [], [], None, [], now_s, syncers=names)
        self.model.see(Poll(now_s=now_s, status=status, **({"began_s": 1000.0} | given)))
        marks = self.model.patch().get("marks", [])
        return [f"{mark['at_s'] - 1000:g} {mark['who']} {mark['what']}: {mark['detail']}" for mark in marks]


def test_a_syncer_that_goes_is_told_with_when_it_was_there_last() -> None:
    """Absence does not tell whether it was stopped in order.

    A moment's absence is not told, since syncers announce themselves again after a restart of Redis.
    """
    page = Watched()
    assert page.see(1001.0, "a", "b") == []
    assert page.see(1002.0, "a") == []
    assert page.see(1004.0, "a", "b") == []
    assert page.see(1008.0, "a") == []
    assert page.see(1010.0, "a") == ["4 syncer b left or died: "]
    assert page.see(1011.0) == []
    assert page.see(1016.0) == ["10 syncer a left or died: no syncer is left, so nothing is merged"]
    assert page.see(1017.0) == []
    assert page.see(1018.0, "c") == ["18 syncer c joined: "]


def test_a_death_that_an_event_has_told_is_not_told_twice() -> None:
    """The launcher knows of its own syncers' deaths before their presence lapses; one that comes back has joined."""
    page = Watched()
    page.see(1001.0, "a", "b")
    died = Event(name="syncer_died", who="b", detail="killed", unix_s=1002.0)
    assert page.see(1003.0, "a", events=[died]) == ["2 b died: killed"]
    assert page.see(1009.0, "a") == []
    assert page.see(1010.0, "a", "b") == ["10 syncer b joined: "]


def test_a_dead_syncer_that_is_still_announced_has_not_joined() -> None:
    """Its announcement lasts for a lease time after the launcher has told of its death."""
    page = Watched()
    page.see(1001.0, "a", "b")
    died = Event(name="syncer_died", who="b", detail="killed", unix_s=1002.0)
    assert page.see(1002.0, "a", "b", events=[died]) == ["2 b died: killed"]
    for now_s in (1003.0, 1006.0):
        assert page.see(now_s, "a", "b") == []
    for now_s in (1007.0, 1012.0):
        assert page.see(now_s, "a") == []
    assert page.see(1013.0, "a", "b") == ["13 syncer b joined: "]
    assert page.see(1014.0, "a") == []
    assert page.see(1019.0, "a") == ["13 syncer b left or died: "], "in its second life, of which no event has told"


def test_a_restarted_syncer_has_joined_however_short_its_absence() -> None:
    page = Watched()
    page.see(1001.0, "a", "b")
    page.see(1002.0, "a", "b", events=[Event(name="syncer_died", who="b", detail="killed", unix_s=1002.0)])
    assert page.see(1003.0, "a") == []
    assert page.see(1004.0, "a", "b") == ["4 syncer b joined: "]
    assert page.see(1005.0, "a", "b") == []


def test_a_page_that_comes_late_takes_old_deaths_for_no_news() -> None:
    """They are listed as such; a syncer that was there all along neither joins nor goes unnoticed."""
    page = Watched()
    died = [Event(name="syncer_died", who=name, detail="killed", unix_s=1002.0) for name in ("b", "c")]
    assert page.see(1100.0, "a", "b", events=died) == ["2 b died: killed", "2 c died: killed"]
    assert page.see(1101.0, "a", "b") == []
    assert page.see(1102.0, "a") == []
    assert page.see(1107.0, "a") == ["101 syncer b left or died: "]
    assert page.see(1108.0, "a", "c") == ["108 syncer c joined: "]


def test_syncers_that_leave_a_finished_run_are_not_told() -> None:
    page = Watched()
    page.see(1001.0, "a")
    assert page.see(1002.0, "a", phase=Phase.CLOSING) == []
    assert page.see(1009.0, phase=Phase.FINISHED) == []


def test_a_page_that_was_not_there_sees_a_takeover_on_the_tape() -> None:
    """Once for all fragments that pass over together, with how long nothing was merged."""
    records = [merge(0, 1, "a", 1010.0), merge(1, 1, "a", 1012.0), merge(0, 2, "b", 1070.0), merge(1, 2, "b", 1071.0)]
    told = "70 syncer b took over from a: first merge of fragment 0, 1:00 after the last one"
    page = Watched()
    assert page.see(1072.0, "b", records=records) == [told]
    assert page.see(1073.0, "b", records=[merge(0, 3, "b", 1072.5)]) == []


def test_an_extended_run_is_not_taken_over() -> None:
    """All its parties are new: nobody who was in the first part's merges goes on."""
    records = [merge(p, 1, "a", 1010.0 + p) for p in range(2)]
    records += [merge(p, version, "b", 1100.0 + 2 * version + p, "1" * 8) for version in (2, 3) for p in range(2)]
    assert Watched().see(1120.0, "b", records=records) == []


def test_a_resumed_run_says_from_where() -> None:
    page = Watched()
    assert page.see(1001.0, "a", origin_s=500.0) == ["0 the run was resumed: from checkpoint-7"]
    assert page.see(1002.0, "a", origin_s=500.0) == []
    assert Watched().see(1001.0, origin_s=1000.0) == []


def test_what_a_checkpoint_brings_is_no_growth() -> None:
    """Merges and tokens of a resumed run's earlier part are there from the start of their charts."""
    model = PageModel("run")
    for now_s, state, fragments in (
        (1000.0, None, 0),
        (1001.0, samples.run_state(), 1),
        (1002.0, samples.run_state(), 2),
    ):
        heads = [samples.head(p, version=30, merged_tokens=900) for p in range(fragments)]
        status = build_status("run", samples.spec(), state, [], heads, None, [], now_s, syncers={"0": "a"})
        began_s = None if state is None else state.started_unix_s
        shares = {0: 0.75, 1: 0.25} if state else {}
        model.see(Poll(now_s=now_s, status=status, shares=shares, began_s=began_s))
        model.patch()
    merges = [one for one in model.snapshot()["coarse"]["series"]["merges"] if one is not None]
    assert set(merges) == {60}
