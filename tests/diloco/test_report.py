"""The report, the demonstration's measure, the tape's archive and the picture."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from diloco.launcher.demo import StepLog, measure
from diloco.launcher.plot import draw
from diloco.launcher.report import (
    Kill,
    Origin,
    Outcome,
    build,
    learner_rows,
    ledger_line,
    summary,
    summary_so_far,
    tokens_at,
)
from diloco.pipeline.errors import BadMessage
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed, RefusalReason, Rejected, Rewound, WindowChanged
from diloco.pipeline.messages.run import Evaluation, Event, LearnerReport
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.view.ledger_inputs import LedgerInputs
from diloco.pipeline.view.merged_share import MergedShare
from diloco.pipeline.view.status import build_status
from diloco.tape import as_json, as_text, read_archive
from tests import samples

LAYOUT = layout_of(
    [
        TensorSpec(name="a", shape=(3,), dtype="float32", rule="rda", fragment=0),
        TensorSpec(name="b", shape=(7,), dtype="float32", rule="rda", fragment=1),
    ]
)


def committed(fragment: int, version: int, *parts: tuple[str, str, int], unix_s: float = 1.0) -> Committed:
    return samples.committed(
        fragment=fragment,
        version=version,
        base_digest=bytes(16),
        contributions=tuple(
            samples.contribution(who, incarnation=life, base_version=version - 1, tokens=tokens, weight=1 / len(parts))
            for who, life, tokens in parts
        ),
        unix_s=unix_s,
    )


def rejected(
    fragment: int, who: str, incarnation: str, tokens: int, lost: int, unix_s: float = 1.0, base: int = 9
) -> Rejected:
    told: dict[str, Any] = {"fragment": fragment, "version": 1, "base_version": base, "reason": RefusalReason.TOO_STALE}
    return samples.rejected(who, incarnation=incarnation, tokens=tokens, lost_tokens=lost, unix_s=unix_s, **told)


def report(
    who: str, incarnation: str, tokens: int, overwritten: int = 0, left: bool = True, **more: Any
) -> LearnerReport:
    published = tokens * LAYOUT.elements - overwritten
    fields: dict[str, Any] = {"step": tokens // 10, "wall_s": tokens / 100, "published": published}
    fields |= {"overwritten": overwritten} | more
    return samples.report(who, incarnation=incarnation, tokens=tokens, left=left, **fields)


def ledger_inputs(*reports: LearnerReport, **more: Any) -> LedgerInputs:
    return LedgerInputs(reports=reports, **more)


A, B, C = ("a", "00000001"), ("b", "00000002"), ("b", "00000003")


# --- report ----------------------------------------------------------------------------------------


def evaluation(tokens: int, elapsed_s: float, loss: float, final: bool = False) -> Evaluation:
    return samples.evaluation(loss=loss, tokens=tokens, unix_s=1000 + elapsed_s, elapsed_s=elapsed_s, final=final)


SETTINGS = {"method": "decoupled", "seed": 3, "run": "run", "tokens": 180, "learners": 2}


def outcome(**changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "settings": SETTINGS,
        "stopped": False,
        "wall_s": 12.5,
        "elapsed_s": 10.5,
        "outer_steps": 4,
        "started_unix_s": 1000.0,
        "layout": LAYOUT,
        "records": [committed(0, 1, (*A, 100), (*B, 60)), committed(1, 1, (*A, 100), (*B, 60))],
        "ledger_inputs": ledger_inputs(report(*A, tokens=100), report(*B, tokens=80, left=False)),
        "evaluations": [evaluation(50, 3.0, 4.0), evaluation(180, 12.0, 2.5, final=True)],
        "events": [Event(name="learner_killed", who="b", detail="", unix_s=1006.0)],
        "progress": [(1000.0, 0), (1012.0, 180)],
    } | changes
    return Outcome(**fields)


def test_the_report_holds_what_others_rely_on_and_is_json():
    built = json.loads(json.dumps(build(outcome())))
    assert built["global_val_loss"] == 2.5
    assert (built["tokens"], built["merged_tokens"]) == (180, 160)
    assert built["tokens_lost"] == {"overwritten": 0, "rejected": 0, "died": 20, "pending": 0, "unaccounted": 0}
    assert built["token_elements"]["trained"] == 1800 == 1600 + built["token_elements"]["died"]
    assert ledger_line(built) == "180 trained = 160 merged + 0 overwritten + 0 rejected + 20 died + 0 pending"
    assert (built["wall_s"], built["outer_steps"]) == (12.5, 4)
    assert [row["id"] for row in built["learners"]] == ["a", "b"]
    assert {"id", "steps", "tokens", "tokens_per_s", "step_s_median", "blocked_s"} <= set(built["learners"][0])
    assert built["events"][0] | {"detail": ""} == {
        "name": "learner_killed",
        "who": "b",
        "detail": "",
        "elapsed_s": 6.0,
        "tokens": 90,
    }
    assert built["warnings"] == []


def test_the_report_divides_time_by_the_fates_on_the_tape():
    """Of the run and of each learner, who is told late deltas from other refused ones."""
    seen = [samples.seen("a", age_s=0.0, wall_s=300.0, blocked_s=30.0), samples.seen("b", age_s=100.0, wall_s=200.0)]
    timed = build_status("run", samples.spec(), samples.run_state(), seen, [], None, [], 1300.0)["goodput"]
    given = ledger_inputs(report(*A, tokens=100, overwritten=70), report(*B, tokens=100, left=False))
    unsound = rejected(1, *A, tokens=20, lost=20, base=8).model_copy(update={"reason": RefusalReason.NON_FINITE})
    refusals = [rejected(0, *A, tokens=10, lost=10), unsound]
    merges = [committed(0, 1, (*A, 90), (*B, 50)), committed(1, 1, (*A, 70), (*B, 50))]
    built = json.loads(json.dumps(build(outcome(goodput=timed, records=[*merges, *refusals], ledger_inputs=given))))
    found = built["goodput"]
    assert built["tokens_lost"]["rejected"] == 17
    lost = {"overwritten": 7, "late": 3, "refused": 14, "died": 50}
    badput = {"blocked": 30 / 600, "joining": 0, "rejoining": 0, "away": 100 / 600}
    assert found["since_start"]["badput"] == pytest.approx(
        badput | {cause: 470 / 600 * tokens / 200 for cause, tokens in lost.items()}
    )
    assert found["since_start"]["goodput"] == pytest.approx(470 / 600 * 126 / 200)
    assert found["merged_tokens"] == 126
    assert found["learners"]["a"]["goodput"] == pytest.approx(270 / 300 * 76 / 100)
    assert found["learners"]["b"]["badput"]["died"] == pytest.approx(200 / 300 * 50 / 100)
    assert "goodput 49.4%, badput 19.6% died, 16.7% away, 5.5% refused, 5.0% blocked" in summary(built)
    assert build(outcome())["goodput"] is None


def test_rounds_longer_than_asked_for_are_in_the_report():
    merges = [committed(0, v, (*A, 100)).model_copy(update={"interval": v}) for v in (2, 30, 40, 400)]
    built = build(outcome(asked_interval=24, records=merges))
    assert built["interval"] == {"asked": 24, "median": 35, "longest": 400}
    assert "rounds take" not in summary(built)
    built = build(outcome(asked_interval=23, records=merges))
    assert "warning: rounds take 35 inner steps instead of 23" in summary(built)


def test_the_merged_share_is_of_the_whole_run_by_the_tape_and_of_its_last_minutes_by_the_status():
    recent = {"recent": 0.6, "recent_s": 300.0, "recent_is_all": False}
    told = MergedShare(since_start=None, pending=None, recent=0.6, recent_s=300.0, recent_is_all=False)
    built = build(outcome(merged_share=told))
    assert built["merged_share"] == {"since_start": pytest.approx(160 / 180), "pending": 0.0} | recent
    assert "merged share 89% (60% in the last 5:00)" in summary(built)
    resumed = build(outcome(origin=Origin("old/checkpoint-50", 50, 45)))
    assert resumed["merged_share"]["since_start"] == pytest.approx(205 / 230)


def test_a_missing_final_evaluation_is_said():
    built = build(outcome(evaluations=[evaluation(50, 3.0, 4.0)]))
    assert built["global_val_loss"] == 4.0
    assert any("final evaluation" in warning for warning in built["warnings"])
    assert build(outcome(evaluations=[]))["global_val_loss"] is None


def test_unaccounted_tokens_and_rewinds_are_warned_of():
    lost = build(outcome(ledger_inputs=ledger_inputs(report(*A, tokens=110), report(*B, tokens=80, left=False))))
    assert lost["tokens_lost"]["unaccounted"] == 10
    assert any("does not close" in warning for warning in lost["warnings"])
    assert "10 unaccounted" in summary(lost)
    rewound = build(outcome(records=[Rewound(fragment=0, version=1, was_version=2, unix_s=1.0)]))
    assert any("earlier state" in warning for warning in rewound["warnings"])


def test_a_resumed_run_counts_its_earlier_part():
    built = build(outcome(origin=Origin("old/checkpoint-50", 50, 45, overwritten=3, rejected=1)))
    assert (built["tokens"], built["merged_tokens"]) == (230, 205)
    assert built["resumed_from"] == {
        "checkpoint": "old/checkpoint-50",
        "tokens": 50,
        "merged_tokens": 45,
        "not_merged_tokens": 5,
        "tokens_lost": {"overwritten": 3, "rejected": 1, "died": 1},
    }
    assert built["tokens"] == built["merged_tokens"] + sum(built["tokens_lost"].values()) + 5
    assert "+ 5 not merged before the checkpoint" in summary(built)


def test_data_parallel_merges_all_it_trains():
    built = build(outcome(settings=SETTINGS | {"method": "data-parallel"}, layout=None, records=[]))
    assert built["tokens"] == built["merged_tokens"] == 180
    assert sum(built["tokens_lost"].values()) == 0


def test_a_learner_started_twice_is_one_row():
    killed = report(*B, tokens=100, left=False, step_s_median=0.2, generation=1)
    [row] = learner_rows([killed, report(*C, tokens=50, generation=2)])
    assert (row["tokens"], row["steps"], row["incarnations"]) == (150, 15, 2)
    assert (row["left"], row["died"]) == (True, False), "in its last life"
    assert row["tokens_per_s"] == pytest.approx(100.0)
    assert row["step_s_median"] == 0.2


def test_the_demonstration_says_what_the_others_and_the_run_lost():
    rates = {"ratio_while": 0.99, "ratio_after": None}
    kill = Kill(*B, 0.4, 5.0, 0.6, 7.0, rates)
    refused = [rejected(1, *A, 10, 10, unix_s=4.0), rejected(0, *A, 20, 20, unix_s=6.0), rejected(0, *B, 9, 9, 6.0)]
    built = build(outcome(kill=kill, records=[*outcome().records, *refused[:2]]))
    assert built["demo"]["others_rejected"] == {"before": 7, "while": 6, "after": 0}
    assert "Rejected tokens of the others: 7 before, 6 while it was away, 0 after" in summary(built)
    died = build(
        outcome(
            kill=kill,
            ledger_inputs=ledger_inputs(report(*A, tokens=110, left=False), report(*B, tokens=80, left=False)),
        )
    )
    assert "10 tokens of others died" in summary(died)
    assert build(outcome(kill=kill, records=refused[2:]))["demo"]["others_rejected"]["while"] == 0
    built = build(outcome(kill=kill))
    assert built["demo"]["others_lost"] == {"died": 0, "unaccounted": 0}
    assert built["demo"]["run_lost"]["died"] == 20
    assert built["demo"]["run_lost"]["not_merged_tokens_by_fragment"] == {"0": 20, "1": 20}
    text = summary(built)
    assert "b was killed at 40%" in text
    assert "0.99 times the earlier rate" in text
    assert "none of them died" in text
    assert "20 of its 80 tokens" in text


@pytest.mark.parametrize(
    ("ranks", "said"),
    [((1, 1), "2 learners, "), ((2, 2), "2 learners of 2 ranks, "), ((8, 1), "2 learners of 1 to 8 ranks, ")],
)
def test_the_ranks_of_learners_are_told(ranks: tuple[int, int], said: str):
    """One is not worth a word."""
    reports = [report(*who, tokens=100, ranks=count) for who, count in zip((A, B), ranks, strict=True)]
    built = build(outcome(ledger_inputs=ledger_inputs(*reports)))
    assert [row["ranks"] for row in built["learners"]] == [*ranks]
    assert said in summary(built)


def test_learners_that_joined_are_told_apart_from_those_that_the_launcher_started():
    built = build(outcome(settings=SETTINGS | {"learners": 1}))
    assert "2 learners (1 started here, 1 joined), " in summary(built)
    assert "decoupled, 2 learners, " in summary(build(outcome()))


@pytest.mark.parametrize("merged", range(0, 80, 7))
def test_what_the_run_lost_with_a_learner_is_what_the_ledger_says_has_died(merged: int):
    """Where nobody else died, it is one number, however it is rounded."""
    kill = Kill(*B, 0.4, 5.0, 0.6, 7.0, {"ratio_while": 0.99, "ratio_after": None})
    records = [committed(0, 1, (*A, 33), (*B, merged)), committed(1, 1, (*A, 21), (*B, 5))]
    given = ledger_inputs(report(*A, tokens=33, overwritten=12 * 7), report(*B, tokens=80, left=False))
    built = build(outcome(kill=kill, records=records, ledger_inputs=given))
    assert built["demo"]["run_lost"]["died"] == built["tokens_lost"]["died"]


def test_a_run_that_nobody_has_evaluated_says_why_it_has_no_loss():
    """One that was not a number is another matter."""
    built = build(outcome(evaluations=[], stopped=True))
    assert "the global validation loss is not known, because no evaluator has measured it" in summary(built)
    assert built["warnings"] == []
    diverged = json.loads(dumps(build(outcome(evaluations=[evaluation(180, 12.0, math.nan, final=True)]))))
    assert "global validation loss not a number" in summary(diverged)


def test_learners_that_died_are_told_among_those_that_took_part():
    """One that came back and left in the end did not."""
    built = build(outcome())
    assert [row["died"] for row in built["learners"]] == [False, True]
    assert "2 learners, 1 of them died, " in summary(built)
    about_to_leave = build(outcome(ledger_inputs=replace(outcome().ledger_inputs, here=frozenset("b"))))
    assert not any(row["died"] for row in about_to_leave["learners"])
    back = ledger_inputs(report(*A, tokens=100), report(*C, tokens=20, generation=2), report(*B, tokens=60, left=False))
    assert "decoupled, 2 learners, 180 tokens" in summary(build(outcome(ledger_inputs=back)))


def test_of_a_run_on_its_redis_the_same_is_said():
    """There a learner is live, has left, or is gone without a word."""
    seen = [samples.seen("a"), samples.seen("b", left=True), samples.seen("c", age_s=400.0)]
    heads = [samples.head(p, version=4) for p in range(2)]
    said = summary_so_far(build_status("my-run", samples.spec(), samples.run_state(), seen, heads, None, [], 1100.0))
    assert "run 'my-run', 3 learners, 1 of them died, " in said
    assert "the global validation loss is not known, because no evaluator has measured it" in said


def test_the_loss_of_an_own_loop_has_no_unit():
    """It may be any number; the built-in trainers' are nats per token."""
    given = [samples.seen("a")], [], samples.evaluation(loss=1.5), []
    own = samples.spec()
    trained = own.model_copy(update={"trainer": own.trainer | {"data_fingerprint": "x"}})
    said = [summary_so_far(build_status("r", spec, samples.run_state(), *given, 1100.0)) for spec in (own, trained)]
    lines = [next(line for line in one.splitlines() if "validation loss" in line) for one in said]
    assert lines == [f"global validation loss 1.5000{unit}, measured at 900 tokens" for unit in ("", " nats per token")]


def test_tokens_at_a_moment_are_interpolated():
    progress = [(10.0, 0), (20.0, 100)]
    assert [tokens_at(progress, t) for t in (5.0, 10.0, 15.0, 30.0)] == [0, 0, 50, 100]
    assert tokens_at([], 1.0) == 0


# --- demonstration -----------------------------------------------------------------------------------


def shown(name: str, step: int, wall_s: float, incarnation: str = "1", age_s: float = 0.0) -> dict[str, Any]:
    return {"id": name, "incarnation": incarnation, "live": True, "step": step, "wall_s": wall_s, "age_s": age_s}


def test_step_rates_are_measured_in_the_three_spans():
    """The other learner made 5 steps a second, 4 while the killed one was away, 5 again."""
    log = StepLog()
    step = 0.0
    for t in range(31):
        step += 4 if 10 < t <= 20 else 5
        present = [shown("a", round(step), float(t))]
        if t <= 10 or t > 22:
            present.append(shown("b", 5 * t + 5, float(t), incarnation=str(t > 20)))
        log.add(present, float(t))
    found = measure(log, "b", 10.0, 20.0, 30.0)
    assert found["steps_per_s_of_others"]["a"] == pytest.approx({"before": 5.0, "while": 4.0, "after": 5.0})
    assert found["ratio_while"] == pytest.approx(0.8)
    assert found["ratio_after"] == pytest.approx(1.0)
    assert found["away_s"] == 10.0


def test_the_measure_starts_when_all_learners_are_under_way():
    log = StepLog()
    log.add([shown("a", 1, 0.0)], 0.0)
    log.add([shown("a", 2, 5.0)], 5.0)
    log.add([shown("a", 20, 6.0), shown("b", 1, 0.0)], 6.0)
    log.add([shown("a", 40, 7.0), shown("b", 2, 1.0)], 7.0)
    assert measure(log, "b", 7.0, None, 7.0)["steps_per_s_of_others"]["a"]["before"] == pytest.approx(20.0)


def test_a_span_without_two_reports_has_no_rate():
    log = StepLog()
    log.add([shown("a", 1, 0.0)], 0.0)
    found = measure(log, "b", 1.0, None, 2.0)
    assert found["steps_per_s_of_others"]["a"] == {"before": None, "while": None}
    assert found["ratio_while"] is None


# --- the tape's archive --------------------------------------------------------------------------------

RECORDS = [
    WindowChanged(fragment=0, version=0, attempt=0, reason="opened", unix_s=1.0),
    committed(0, 1, (*A, 10), unix_s=2.0),
    rejected(1, *B, tokens=5, lost=5, unix_s=3.0),
    Rewound(fragment=0, version=0, was_version=1, unix_s=4.0),
]


def test_an_archive_is_read_in_order_and_each_record_once(tmp_path):
    """Also when a restarted syncer wrote the beginning again, and with several fragment groups."""
    (tmp_path / "0.msgpack").write_bytes(b"".join(map(encode, [RECORDS[0], RECORDS[3], RECORDS[0], RECORDS[3]])))
    (tmp_path / "1.msgpack").write_bytes(b"".join(map(encode, [RECORDS[1], RECORDS[2]])))
    assert read_archive(tmp_path) == RECORDS


def test_archives_of_several_syncers_make_one_tape_in_order(tmp_path):
    """One was killed, one began late; a record whose syncer's clock is behind stays where its tape has it."""
    ahead = committed(0, 5, ("a", "0" * 8, 10), unix_s=50.0)
    behind = committed(0, 6, ("a", "0" * 8, 10), unix_s=49.0)
    tape = [*(committed(0, v, ("a", "0" * 8, 10), unix_s=10.0 * v) for v in range(1, 5)), ahead, behind]
    (tmp_path / "0-aa.msgpack").write_bytes(b"".join(map(encode, tape[:5])))
    (tmp_path / "0-bb.msgpack").write_bytes(b"".join(map(encode, tape[2:])))
    (tmp_path / "0-cc.msgpack").write_bytes(b"")
    assert read_archive(tmp_path) == tape


def test_a_record_cut_short_is_left_out_and_a_damaged_one_refused(tmp_path):
    whole = b"".join(map(encode, RECORDS))
    (tmp_path / "0.msgpack").write_bytes(whole[:-3])
    assert read_archive(tmp_path) == RECORDS[:3]
    (tmp_path / "0.msgpack").write_bytes(whole + b"\xc1" * 4)
    with pytest.raises(BadMessage, match=r"0\.msgpack"):
        read_archive(tmp_path)
    (tmp_path / "0.msgpack").write_bytes(whole.replace(b"too_stale", b"too_sleek"))
    with pytest.raises(BadMessage, match=r"0\.msgpack: the record at byte \d+ is damaged.*another syncer"):
        read_archive(tmp_path)
    second = len(encode(RECORDS[0]))
    for longer in (b"\xdd\x7f\xff\xff\xff", b"\xc6\x7f\xff\xff\xff"):  # an array, bytes: the rest is taken for them
        (tmp_path / "0.msgpack").write_bytes(whole[:second] + longer + whole[second + 5 :])
        with pytest.raises(BadMessage, match=rf"the record at byte {second} is damaged"):
            read_archive(tmp_path)


def test_tape_records_read_as_text_and_as_json():
    texts = [as_text(record, 1.0) for record in RECORDS]
    assert "attempt 0: opened" in texts[0]
    assert "merged to version 1: a 10 tokens in 4 steps" in texts[1]
    assert "rejected a delta of b" in texts[2]
    assert "too_stale, 5 tokens of this fragment lost" in texts[2]
    assert "rewound from version 1 to 0" in texts[3]
    assert json.loads(as_json(RECORDS[1]))["digest"] == "00" * 16


def test_a_merge_on_the_tape_has_its_outer_step(tmp_path):
    """Written, read, and printed; what is not known is a dash."""
    parts = (samples.contribution("a", cosine=0.25), samples.contribution("b"))
    merge = samples.committed(contributions=parts, norm=4.0, step_norm=3.0, rho=-0.125)
    (tmp_path / "0.msgpack").write_bytes(encode(merge) + encode(samples.committed()))
    found, nothing = read_archive(tmp_path)
    assert found == merge
    assert "; delta 4 step 3 rate 0.75 rho -0.12; test" in as_text(found, 0.0)
    assert "a 400 tokens in 4 steps (1.00, cosine 0.25), b 400 tokens in 4 steps (1.00); " in as_text(found, 0.0)
    assert "; delta 0 step - rate - rho -; test" in as_text(nothing, 0.0)
    line = json.loads(as_json(found))
    assert [line[name] for name in ("norm", "step_norm", "rho")] == [4.0, 3.0, -0.125]


# --- picture -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [0, 1, 5])
@pytest.mark.parametrize("learners", [0, 2, 12])
def test_the_picture_is_drawn_however_few_losses_there_are(tmp_path, points, learners):
    losses = [3.0, None, 2.5, *[2.0] * 30]
    curves = [{"learner": f"l{n}", "begin_s": 1001.0, "every_s": 2.0, "losses": losses} for n in range(learners)]
    evaluations = [evaluation(10 * i, float(i), 4.0 - i / 10) for i in range(points)]
    built = build(outcome(evaluations=evaluations, curves=curves))
    draw(built, built["events"], "title", ledger_line(built), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_has_the_learners_losses_by_time_and_tokens():
    """Of the whole run, and its summary draws their mean in a line."""
    curve = {"learner": "l0", "begin_s": 1001.0, "every_s": 2.0, "losses": [3.0, None, 2.5]}
    built = build(outcome(curves=[curve], progress=[(1000.0, 0), (1010.0, 200)]))
    assert built["curves"] == [curve | {"begin_s": 1.0, "tokens": [60, 100, 140]}]
    line = "training loss of 1 learner 3 "
    assert line in summary(json.loads(json.dumps(built)))
    del built["curves"]  # of an earlier build
    assert line not in summary(built)
