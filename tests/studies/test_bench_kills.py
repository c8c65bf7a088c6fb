"""Promises about `bench kills`: the same kills for all methods, what becomes of a run's records, and going on."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco_studies.bench.kills import command, curves
from diloco_studies.bench.kills.curves import Run, equal_time, loss_at, result_of, rows, trained_at
from diloco_studies.bench.kills.plan import METHODS, RENDEZVOUS, Plan, in_words, kills, torchrun
from diloco_studies.strikes.rates import Struck
from diloco_studies.strikes.schedule import Manner, Party

PLAN = Plan(machines=2, tokens=100_000, pace_s=1.0, every_s=35.0, away_s=5.0, within_s=600.0, seed=1)
STEPS = {
    "learner-0": [101.0, 102.0, 103.0, 110.0, 111.0],  # nobody trained from 103.5 to 110
    "learner-1": [101.5, 102.5, 103.5, 110.5, 111.7],
}
RUN = Run(
    evaluations=[(101.0, 1024, 5.0), (103.6, 6144, 4.0), (105.6, 6144, 4.0), (112.0, 10240, 3.0)],
    steps=STEPS,
    strikes=[Struck(Manner.KILL, Party.LEARNER, "learner-1", 103.6, 108.6)],
    tokens={"trained": 10240, "final": 9216, "lost": 1024},
    finished=True,
)
RESULT = result_of(RUN, PLAN)


def test_a_seed_names_who_is_killed_when_and_no_two_are_away_at_once() -> None:
    found = kills(PLAN)
    assert found == kills(PLAN)
    assert found != kills(replace(PLAN, seed=2))
    assert all(0.85 * 35 <= late.at_s - early.at_s <= 1.15 * 35 for early, late in pairwise(found))
    assert {one.length_s for one in found} == {5.0}
    assert {one.victim(["a", "b"]) for one in found} == {"a", "b"}
    assert "learner-0 at 35 s" in in_words(PLAN)
    assert kills(replace(PLAN, within_s=30.0)) == []


def test_a_longer_run_meets_the_same_kills_and_then_more() -> None:
    longer = kills(replace(PLAN, within_s=900.0))
    assert longer[: len(kills(PLAN))] == kills(PLAN)


@pytest.mark.parametrize(("method", "nodes"), [("elastic", "1:2"), ("data-parallel", "2"), ("undisturbed", "2")])
def test_only_the_elastic_method_may_go_on_with_a_machine_fewer(method: str, nodes: str) -> None:
    arguments = torchrun(METHODS[method], PLAN, "127.0.0.1:5", Path("train.py"), ["settings.toml"])
    assert f"--nnodes={nodes}" in arguments
    assert arguments[-2:] == ["train.py", "settings.toml"]
    (conf,) = (one for one in arguments if one.startswith("--rdzv-conf="))
    assert dict(pair.split("=") for pair in conf.removeprefix("--rdzv-conf=").split(",")) == {
        name: str(value) for name, value in RENDEZVOUS.items()
    }


def test_time_begins_when_the_last_machine_has_made_a_step() -> None:
    assert RESULT["curve"][0] == [-0.5, 1024, 5.0]
    assert RESULT["ended_s"] == 10.2
    assert RESULT["trained"][-1] == [10.2, 10 * 1024]


def test_an_interruption_is_when_nobody_trains() -> None:
    assert RESULT["interruptions"] == [{"at_s": 2.0, "length_s": 6.5}]
    others_go_on = replace(RUN, steps=STEPS | {"learner-0": [101.0 + n for n in range(11)]})
    assert result_of(others_go_on, PLAN)["interruptions"] == []


def test_a_killed_machine_is_back_with_its_first_step_after_the_restart() -> None:
    assert RESULT["kills"] == [{"machine": "learner-1", "at_s": 2.1, "started_s": 7.1, "trains_s": 9.0}]
    gone = replace(RUN, steps=STEPS | {"learner-1": [101.5, 102.5]})
    assert result_of(gone, PLAN)["kills"][0]["trains_s"] is None


def test_steps_that_miss_the_pace_are_told_and_interruptions_are_not_among_them() -> None:
    assert RESULT["step_s"] == pytest.approx(6.2 / 6, abs=1e-3)
    assert RESULT["late_share"] == pytest.approx(1 / 6, abs=1e-3), "one of six took 1.2 s"


def test_loss_and_tokens_at_a_time_are_those_of_what_was_there_then() -> None:
    assert (loss_at(RESULT, 4.5), loss_at(RESULT, 10.4), loss_at(RESULT, 10.5)) == (4.0, 4.0, 3.0)
    assert (trained_at(RESULT, 3.0), trained_at(RESULT, 100.0)) == (5 * 1024, 10 * 1024)


def test_methods_are_compared_when_the_first_killed_one_is_through() -> None:
    slower = RESULT | {"ended_s": 20.0}
    calm = RESULT | {"ended_s": 5.0, "kills": []}
    assert equal_time({"elastic": slower, "decoupled": RESULT, "undisturbed": calm}) == 10.2
    assert equal_time({"elastic": slower, "decoupled": RESULT | {"finished": False}}) == 20.0
    assert equal_time({"undisturbed": calm}) == 5.0


def test_the_table_has_a_value_for_each_method() -> None:
    found = dict(rows({"decoupled": RESULT, "undisturbed": RESULT | {"kills": [], "interruptions": []}}, PLAN))
    assert found["held-out loss after 10 s"] == ["4.000", "4.000"]
    assert found["nobody trained (median, least - most)"] == ["1: 6.5 s (6.5 - 6.5), 6 s in all", "none"]
    assert found["from a kill until that machine trains again"] == ["6.9 s (6.9 - 6.9)", "-"]
    assert found["lost"] == ["1,024 (10.0%)"] * 2


def given(out: Path, **more: Any) -> None:
    usual = {"plot": None, "only": "", "tokens": "100k", "machines": 2, "every": "35s", "away": "5s", "pace": "1s"}
    command.main(out, **usual | {"within": "10m", "seed": 1} | more)


def test_methods_with_a_result_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def make(method: Any, plan: Plan, out: Path) -> curves.Result:
        ran.append(method.name)
        result: curves.Result = RESULT | {"plan": plan.written()}
        (out / f"{method.name}.json").write_text(json.dumps(result))
        return result

    monkeypatch.setattr(command, "make", make)
    given(tmp_path, only="elastic")
    given(tmp_path)
    assert ran == ["elastic", "decoupled", "data-parallel", "undisturbed"]
    given(tmp_path)
    assert len(ran) == 4
    assert (tmp_path / "kills.png").stat().st_size > 5000
    assert "| final held-out loss | 3.000 | 3.000 | 3.000 | 3.000 |" in capsys.readouterr().out


def test_a_stopped_method_ends_the_command_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "make", lambda *_: None)
    with pytest.raises(typer.Exit) as ended:
        given(tmp_path)
    assert ended.value.exit_code == 130
    assert "stopped in decoupled: repeat the command to continue" in capsys.readouterr().out


def test_results_of_other_settings_are_not_shown_beside_these(tmp_path: Path) -> None:
    (tmp_path / "elastic.json").write_text(json.dumps({"plan": PLAN.written() | {"pace_s": 0.5}}))
    with pytest.raises(UsageError, match=r"elastic.json was measured with other settings \(\{'pace_s': 0.5\}\)"):
        given(tmp_path)
    (tmp_path / "elastic.json").write_text("[]")
    with pytest.raises(UsageError, match=r"not a result of `diloco bench kills`.*delete it"):
        given(tmp_path)


WHOLE = RESULT | {"plan": PLAN.written()}
DAMAGED = {
    "a number for a plan": WHOLE | {"plan": 5},
    "no curve": WHOLE | {"curve": []},
    "no kills": {name: value for name, value in WHOLE.items() if name != "kills"},
    "a word for a time": WHOLE | {"ended_s": "late"},
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_result_is_named_before_anything_is_run(damage: str, tmp_path: Path) -> None:
    (tmp_path / "elastic.json").write_text(json.dumps(DAMAGED[damage]))
    with pytest.raises(UsageError, match=r"elastic.json is not a result of .*delete it to measure again"):
        given(tmp_path)


def test_a_run_that_came_to_nothing_still_has_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One machine's only step, nothing trained, and a loss that is no number: now and when it is read again."""
    run = replace(RUN, evaluations=[(103.0, 0, float("nan"))], steps={"learner-0": [101.0]}, strikes=[])
    made = result_of(replace(run, tokens={"trained": 0, "final": 0, "lost": 0}), PLAN)
    found = dict(rows({"elastic": made}, PLAN))
    assert (found["a step, mean"], found["lost"], found["final held-out loss"]) == (["-"], ["-"], ["nan"])
    for name in METHODS:
        (tmp_path / f"{name}.json").write_text(dumps(made | {"plan": PLAN.written()}))
    given(tmp_path)
    assert "| a step, mean | - | - | - | - |" in capsys.readouterr().out
    assert (tmp_path / "kills.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"only": "ddp"}, "--only ddp: use one of decoupled, elastic, data-parallel, undisturbed"),
        ({"pace": "fast"}, "--pace fast: use a duration"),
        ({"away": "0s"}, "--away 0s: use a duration"),
        ({"every": "0.000001s"}, "--every 0.000001s: 600,000,000 kills --within 10m, but at most 10,000 are allowed"),
        ({"tokens": "many"}, "--tokens many: give positive numbers"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_run(wrong: dict[str, str], told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        given(tmp_path, **wrong)
