"""The status: its shape, its token accounting, its warnings."""

import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import msgpack
import numpy as np
import pytest

from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.fragment import Head, WindowView
from diloco.pipeline.messages.run import Event, Phase
from diloco.pipeline.payload.codec import decode, encode
from diloco.pipeline.view.status import FragmentStatus, LearnerStatus, Status, WindowStatus, build_status
from diloco.pipeline.view.status_reader import read_status
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time, run_virtual
from tests import samples


def build(**given):
    values = {
        "run": "r",
        "spec": samples.spec(),
        "state": samples.run_state(),
        "reports": [samples.seen()],
        "heads": [samples.head(0), samples.head(1)],
        "evaluation": None,
        "bus_warnings": (),
        "now_unix_s": 1010.0,
    }
    return build_status(**{**values, **given})


def lost(status):
    return status["tokens_lost"]


def test_the_shape_is_one_and_json():
    """Before the run's first spec too. `Status` has the names, on which readers (display, report, people) may rely."""
    window = WindowView(
        state="grace", attempt=2, members=("l0",), expected=3, reason="grace: 1 in", deadline_unix_s=1012.5
    )
    heads = [samples.head(0, window=window, version=3, interval=40), samples.head(1)]
    status = build(heads=heads, evaluation=samples.evaluation(loss=1.5))
    assert json.loads(json.dumps(status)) == status
    assert status["evaluation"] == {"loss": 1.5, "tokens": 900, "elapsed_s": 9.0, "final": False}
    assert status["fragments"][0].keys() == FragmentStatus.__annotations__.keys()
    assert status["fragments"][0]["window"].keys() == WindowStatus.__annotations__.keys()
    assert status["fragments"][0]["window"]["deadline_in_s"] == 2.5
    assert status["learners"][0].keys() == LearnerStatus.__annotations__.keys()
    empty = build(spec=None, state=None, reports=[], heads=[])
    assert empty.keys() == status.keys() == Status.__annotations__.keys()
    assert (empty["phase"], empty["progress"], empty["warnings"]) == ("waiting", 0.0, [])


def test_it_says_which_fragment_is_average_only():
    tensors = (samples.tensor("a", (9,)), samples.tensor("b", (3,), 1, "variance"))
    status = build(spec=samples.spec(tensors=tensors), heads=[samples.head(0), samples.head(1)])
    assert [fragment["averaged"] for fragment in status["fragments"]] == [False, True]


def test_it_says_which_syncer_serves_which_fragment():
    """The one of fragment 0 leads; a lease of a syncer that is gone is nobody's."""
    found = build(syncers={"0b": "a", "0a": "b"}, holders=["0a", "0b", None, "0c", "0a"])["syncers"]
    assert found == [
        {"id": "a", "leads": False, "fragments": [1]},
        {"id": "b", "leads": True, "fragments": [0, 4]},
    ]
    assert build(syncers={"0a": "b"}, holders=["0c"])["syncers"] == [{"id": "b", "leads": False, "fragments": []}]
    assert build()["syncers"] == []


@pytest.mark.parametrize(
    ("syncers", "silent_s", "phase"),
    [({}, 60.0, "waiting"), ({"0a": "s"}, 60.0, "running"), ({}, 0.0, "running"), (None, 60.0, "running")],
)
def test_a_run_that_nobody_is_at_work_on_waits_and_says_for_whom(syncers, silent_s, phase):
    """As one that was extended. With a syncer or a learner, or where it is not known, it goes on."""
    status = build(syncers=syncers, reports=[samples.seen(age_s=silent_s)])
    assert status["phase"] == phase
    assert (status["reason"] == "waiting for a syncer and learners") == (phase == "waiting")
    ended = build(syncers=syncers, reports=[], state=samples.run_state(phase=Phase.FINISHED))
    assert ended["phase"] == "finished"


def test_refused_deltas_are_counted_by_reason_and_suspected_learners_named():
    """Who looks at a run sees that something is wrong with a learner, what, and with which one."""
    window = samples.IDLE.model_copy(update={"suspected": ("l3",)})
    heads = [
        samples.head(0, refused={"non_finite": 2, "absurd_norm": 1}, window=window),
        samples.head(1, refused={"non_finite": 5}, window=window),
    ]
    status = build(heads=heads, reports=[samples.seen("l3")])
    assert status["refused"] == {"absurd_norm": 1, "non_finite": 7}
    assert status["fragments"][0]["refused"] == {"non_finite": 2, "absurd_norm": 1}
    assert status["warnings"] == ["merges do not wait for l3, because their last deltas were refused, late or missing"]
    assert build(heads=heads, reports=[samples.seen()])["warnings"] == [], "it is gone: nobody would wait for it anyway"
    assert build(heads=heads, state=samples.run_state(phase=Phase.FINISHED))["warnings"] == []


def test_tokens_that_a_forger_claims_to_have_lost_do_not_spoil_the_account():
    """No more can have been rejected than was trained."""
    status = build(heads=[samples.head(0, rejected_tokens=2**60)])
    assert status["tokens"] == status["merged_tokens"] + sum(lost(status).values()) == 1000


def test_merged_tokens_count_each_fragment_by_its_share():
    """Fragment 0 is 3/4 of the model: 1000 tokens in it and 200 in fragment 1 are 800 tokens of the model."""
    heads = [samples.head(0, merged_tokens=1000, version=2), samples.head(1, merged_tokens=203, version=5)]
    status = build(heads=heads)
    assert status["merged_tokens"] == 800  # 750 + 50.75, floored
    assert status["outer_steps"] == 7


def test_the_merged_share_is_of_all_that_was_trained_and_pending_stands_beside_it():
    """1000 settled since the first sample, of which 500 merged; 2000 of 4000 in all."""
    heads = [samples.head(0, merged_tokens=2000), samples.head(1, merged_tokens=2000)]
    state = samples.run_state(samples=((910.0, 2000, 1500),))
    found = build(state=state, reports=[samples.seen(tokens=4000, overwritten=800_000)], heads=heads)["merged_share"]
    assert found == {"since_start": 0.5, "pending": 0.25, "recent": 0.5, "recent_s": 100.0, "recent_is_all": False}


def test_the_recent_share_of_a_finished_run_is_of_its_last_minutes():
    """However long ago that was."""
    state = samples.run_state(phase=Phase.FINISHED, samples=((1500.0, 3000, 1500), (1900.0, 3900, 2400)))
    heads = [samples.head(0, merged_tokens=2500), samples.head(1, merged_tokens=2500)]
    found = build(state=state, reports=[samples.seen(tokens=4000, age_s=8000.0)], heads=heads, now_unix_s=10_000.0)
    assert found["merged_share"] | {"pending": 0.0} == {
        "since_start": 0.625,
        "pending": 0.0,
        "recent": 1.0,
        "recent_s": 500.0,
        "recent_is_all": False,
    }


def test_merges_that_take_longer_than_a_round_are_warned_of_while_the_run_goes_on():
    """A round is 4 steps of 0.1 s; a finished run, and one whose learners are gone, has no round."""
    slow = [samples.head(0, window=samples.IDLE.model_copy(update={"merge_s": 7.5})), samples.head(1)]
    [warning] = build(heads=slow)["warnings"]
    assert "fragment 0 takes 7.5 s" in warning
    assert build(heads=slow)["fragments"][0]["window"]["merge_s"] == 7.5
    assert build(heads=slow, state=samples.run_state(phase=Phase.FINISHED))["warnings"] == []
    gone = build(heads=slow, reports=[samples.seen(age_s=60.0)])["warnings"]
    assert [text for text in gone if "round" in text] == []


def test_learners_with_more_threads_than_cores_are_told_what_to_do():
    """Each takes all cores if nobody tells it otherwise. On machines of their own they may."""
    four = [samples.seen(f"l{n}", threads=(2, 2)) for n in range(4)]
    [warning] = build(reports=four)["warnings"]
    assert "8 threads on 2 cores" in warning
    assert "--threads 1" in warning
    for fine in (
        [samples.seen("a", threads=(2, 2), host="x"), samples.seen("b", threads=(2, 2), host="y")],
        [samples.seen("a", threads=(1, 2)), samples.seen("b", threads=(1, 2))],
        [samples.seen(f"l{n}", threads=(1, 2)) for n in range(4)],
        [samples.seen("a"), samples.seen("b")],
        [samples.seen("a", threads=(2, 2)), samples.seen("b", 60.0, threads=(2, 2))],
    ):
        assert build(reports=fine)["warnings"] == []


@pytest.mark.parametrize(
    ("sample", "fields"),
    [
        (samples.report(), ["host", "device"]),
        (Event(name="learner_joined", who="l0", detail="", unix_s=1.0), ["who", "detail"]),
    ],
)
def test_what_learners_say_cannot_command_the_terminal_of_who_reads_it(sample, fields):
    """It stands in warnings, tables and lines: it is printable from where it is read on."""
    said = sample.model_dump() | dict.fromkeys(fields, "\x1b]0;pwned\x07\u202e\n")
    read = decode(type(sample), msgpack.packb(said))
    assert [getattr(read, name) for name in fields] == ["?]0;pwned???"] * 2


@pytest.mark.parametrize(("phase", "rest"), [("running", "pending"), ("draining", "pending"), ("finished", "died")])
def test_every_token_is_accounted_for(phase, rest):
    """tokens = merged + overwritten + rejected + died + pending; the rest is pending until the run is finished."""
    status = build(
        state=samples.run_state(phase=Phase(phase)),
        reports=[samples.seen(tokens=1000, overwritten=80_000), samples.seen("l1", tokens=500)],  # 100 x 800 elements
        heads=[samples.head(0, merged_tokens=1000, rejected_tokens=40), samples.head(1, merged_tokens=1000)],
    )
    assert status["tokens"] == 1500
    assert status["merged_tokens"] == 1000
    assert lost(status) == {"overwritten": 100, "rejected": 30, "died": 0, "pending": 0} | {rest: 370}
    assert status["tokens"] == status["merged_tokens"] + sum(lost(status).values())


def test_a_run_whose_tokens_are_all_accounted_for_has_lost_none_by_rounding():
    """Of 1000 tokens 601.75 merged, 298.5 overwritten, 99.75 rejected: each rounded down, two would have died."""
    heads = [
        samples.head(0, merged_tokens=601, rejected_tokens=100),
        samples.head(1, merged_tokens=604, rejected_tokens=99),
    ]
    status = build(
        state=samples.run_state(phase=Phase.FINISHED),
        reports=[samples.seen(tokens=1000, overwritten=238_800)],
        heads=heads,
    )
    assert (status["merged_tokens"], lost(status)["died"]) == (601, 0)
    assert status["tokens"] == status["merged_tokens"] + sum(lost(status).values()) == 1000


def test_what_a_silent_learner_had_not_published_died():
    """Of what it had published nobody knows without the tape; a live one, and one that left, lost nothing."""
    gone = {"tokens": 1000, "overwritten": 80_000, "published": 480_000}  # of 1000 x 800 elements
    reports = [samples.seen("a", 60.0, **gone), samples.seen("b", **gone), samples.seen("c", 60.0, left=True, **gone)]
    status = build(reports=reports, heads=[])
    assert lost(status) == {"overwritten": 300, "rejected": 0, "died": 300, "pending": 2400}


def test_tokens_of_earlier_parts_of_a_resumed_run_count():
    """Progress goes on where the checkpoint was, and reports newer than the state are believed."""
    status = build(state=samples.run_state(base_tokens=5000, tokens=5500), reports=[samples.seen(tokens=1000)])
    assert status["tokens"] == 6000
    assert status["progress"] == 0.6
    assert build(state=samples.run_state(tokens=20_000))["progress"] == 1.0


def test_heads_whose_server_is_away_are_not_gone_and_what_was_merged_there_still_is():
    """Nobody is told that a syncer has to put them back; what was merged is as the lead has noted it last."""
    state = samples.run_state(tokens=1000, samples=((1000.0, 900, 600),))
    heads = [samples.head(0, merged_tokens=640), None]
    status = build(state=state, heads=heads, away=[1])
    assert (status["phase"], status["reason"], status["merged_tokens"]) == ("running", "training", 600)
    (warning,) = status["warnings"]
    assert "the server of fragments 1 does not answer" in warning
    lost_head = build(state=state, heads=heads)
    assert "the heads of fragments 1 are not on the bus" in lost_head["reason"]
    assert lost_head["merged_tokens"] == 480


def test_what_was_overwritten_and_rejected_before_a_resume_keeps_its_kind():
    """Only the rest of what the checkpoint lacked died; both parts of the run are in each number."""
    state = samples.run_state(
        base_tokens=5000, base_merged=4000, base_overwritten=300 * 800, base_rejected=200 * 800, tokens=5500
    )
    heads = [samples.head(p, merged_tokens=4100, rejected_tokens=20) for p in range(2)]
    reports = [samples.seen(tokens=500, overwritten=30 * 800, published=120 * 800)]
    status = build(state=state, heads=heads, reports=reports)
    assert lost(status) == {"overwritten": 330, "rejected": 220, "died": 500, "pending": 350}
    assert status["tokens"] == status["merged_tokens"] + sum(lost(status).values()) == 5500
    finished = state.model_copy(update={"phase": Phase.FINISHED})
    assert lost(build(state=finished, heads=heads, reports=reports)) == lost(status) | {"died": 850, "pending": 0}


def test_a_learner_is_live_until_it_leaves_or_goes_silent():
    """Live: not left and heard from within the limit."""
    reports = [samples.seen("a", 4.9), samples.seen("b", 5.0), samples.seen("c", 0.1, left=True)]
    assert [learner["live"] for learner in build(reports=reports)["learners"]] == [True, False, False]
    assert [learner["live"] for learner in build(reports=reports, live_s=10)["learners"]] == [True, True, False]


def test_a_quorum_beyond_the_live_learners_is_a_warning():
    """Everybody can see why nothing merges; a restarted learner is one learner; the bus's warnings follow."""
    reports = [samples.seen("a"), samples.seen("a", incarnation="1" * 8), samples.seen("b"), samples.seen("c", 60.0)]
    spec = samples.spec(quorum=3)
    told = "nothing is merged: the quorum is 3, and the run has 2 live learners; start 1 more"
    assert build(spec=spec, reports=reports, bus_warnings=["evicts"])["warnings"] == [told, "evicts"]
    assert build(spec=samples.spec(quorum=2), reports=reports)["warnings"] == []
    drained = samples.run_state(phase=Phase.FINISHED)
    assert build(spec=spec, reports=reports, state=drained)["warnings"] == []


def test_time_stops_with_a_finished_run():
    """Looking at a finished run later does not make it longer: it ended with the last word of a learner."""
    assert build(now_unix_s=1010.0)["elapsed_s"] == 10.0
    finished = samples.run_state(phase=Phase.FINISHED)
    reports = [samples.seen("a", 100.0), samples.seen("b", 103.0)]
    assert build(state=finished, reports=reports, now_unix_s=1150.0)["elapsed_s"] == 50.0
    closing = samples.run_state(phase=Phase.CLOSING)
    assert build(state=closing, reports=reports, now_unix_s=1150.0)["elapsed_s"] == 50.0, "it never goes back"
    looked_in = samples.seen("c", 1.0, step=0, tokens=0, left=True)
    assert build(state=finished, reports=[*reports, looked_in], now_unix_s=1150.0)["elapsed_s"] == 50.0


def test_status_is_read_from_the_bus():
    """All parts are found, the last of many evaluations too, in the last hour or before it."""

    async def main(silence_s: float):
        clock = VirtualClock()
        bus = MemoryBus("r", clock)
        assert (await read_status(bus, clock))["phase"] == "waiting"
        spec = samples.spec(quorum=2)
        await bus.propose_spec(encode(spec))
        await bus.write_state(samples.run_state(started_unix_s=clock.unix()))
        await bus.write_report(samples.report())
        for p, size in enumerate((600, 200)):
            await samples.commit(bus, p, 0, np.zeros(size, np.float32))
        for n in range(1500):
            await bus.add_evaluation(samples.evaluation(loss=float(n), tokens=n))
        await asyncio.sleep(silence_s)
        return await read_status(bus, clock)

    for silence_s, live in ((1.0, 1), (8000.0, 0)):
        status = run_virtual(main(silence_s))
        assert status["phase"] == ("running" if live else "waiting")
        assert status["evaluation"]["loss"] == 1499.0
        assert status["elapsed_s"] == silence_s
        assert status["learners"][0]["age_s"] == pytest.approx(silence_s)
        has = "1 live learner; start 1" if live else "0 live learners; start 2"
        assert status["warnings"][0] == f"nothing is merged: the quorum is 2, and the run has {has} more"


def test_a_fragments_server_that_does_not_answer_is_told_from_a_head_that_is_gone():
    async def main() -> Status:
        bus = MemoryBus("r", VirtualClock())
        await bus.propose_spec(encode(samples.spec(groups=2)))
        await bus.write_report(samples.report())
        read = bus.read_heads

        async def some(fragments: Sequence[int]) -> list[Head | None]:
            if 1 in fragments:
                raise BusUnavailable("away")
            return await read(fragments)

        bus.read_heads = some  # type: ignore[method-assign]
        return await read_status(bus, VirtualClock())

    status = run_virtual(main())
    assert "the heads of fragments 0 are not on the bus" in status["reason"]
    assert any("the server of fragments 1 does not answer" in warning for warning in status["warnings"])


HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("info", "answers_s", "shown_s"),
    [
        ({}, math.inf, [9.0, 3600.0]),
        ({"takes_writes": False}, math.inf, [0.0, 3591.0]),
        ({"up_s": 2.0}, math.inf, [2.0, 3593.0]),
        ({}, 2.0, [2.0, 3593.0]),
        ({"up_s": 8.0}, math.inf, [9.0, 3600.0]),
        ({"up_s": 10.0}, math.inf, [9.0, 3600.0]),
    ],
)
def test_nobody_is_silent_for_as_long_as_redis_took_no_writes(
    info: dict[str, Any], answers_s: float, shown_s: list[float]
) -> None:
    """It refused them, was started a moment ago, or has just answered again: who was silent before still is."""

    async def main() -> list[LearnerStatus]:
        bus = MemoryBus("r", VirtualClock())
        await bus.write_report(samples.report("gone"))
        await asyncio.sleep(HOUR_S - 9)
        await bus.write_report(samples.report())
        await asyncio.sleep(9)
        told = dataclasses.replace(await bus.info(), **info)
        bus.info = AsyncMock(return_value=told)  # type: ignore[method-assign]
        return (await read_status(bus, VirtualClock(), answers_s=answers_s))["learners"]

    learners = {one["id"]: one for one in run_virtual(main())}
    assert [learners[name]["age_s"] for name in ("l0", "gone")] == pytest.approx(shown_s)
    assert learners["l0"]["live"] is (shown_s[0] < 5)
    assert not learners["gone"]["live"]


@pytest.mark.parametrize(("said", "asked", "live"), [(None, None, False), (20.0, None, True), (20.0, 5.0, False)])
@in_virtual_time
async def test_who_is_live_follows_from_the_run(said, asked, live):
    """A learner that was heard from eight seconds ago is live where the run's syncers wait for twenty."""
    bus = MemoryBus("run", VirtualClock())
    await bus.propose_spec(encode(samples.spec()))
    await bus.write_report(samples.seen().report)
    await bus.write_state(samples.run_state(liveness_s=said))
    await asyncio.sleep(8)
    (learner,) = (await read_status(bus, VirtualClock(), asked))["learners"]
    assert learner["live"] is live


def test_the_status_says_how_the_outer_step_fits_and_warns_before_the_first_merge():
    """A third of 4 steps of 0.1 s; reckoned, since nothing was merged yet. A finished run has nothing to say of it."""
    window = samples.IDLE.model_copy(update={"outer_s": 0.2})
    heads = [samples.head(0, window=window), samples.head(1)]
    found = build(heads=heads)
    assert found["outer_step"] == {"outer_s": 0.2, "room_s": pytest.approx(0.4 / 3), "share": pytest.approx(1.5)}
    assert "0.2 s of it the outer step" in found["warnings"][0]
    assert build(heads=[samples.head(0), samples.head(1)])["outer_step"] is None
    assert build(heads=heads, state=samples.run_state(phase=Phase.FINISHED))["outer_step"] is None
