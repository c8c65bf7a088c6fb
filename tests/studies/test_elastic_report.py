"""The data-parallel baseline under strikes: what counts as progress, its report, and two runs side by side."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.launcher.folder import Folder
from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import load
from diloco_studies.strikes.command import calm, read_report
from diloco_studies.strikes.compare import compare, table
from diloco_studies.strikes.elastic.report import ElasticFacts, build_elastic, firsts, markdown, summary
from diloco_studies.strikes.elastic.run import Rank, Ranks, Watch
from diloco_studies.strikes.rates import Struck
from diloco_studies.strikes.schedule import Manner, Party
from diloco_studies.strikes.settings import ChaosProcess


def life(name: str, first: int, last: int, from_s: float) -> tuple[str, list[tuple[int, float]]]:
    """A step a second."""
    return name, [(step, from_s + step - first + 1) for step in range(first, last + 1)]


STEPS = {  # killed at step 6 of which 4 are in a checkpoint, back three seconds later
    "learner-0": [life("0", 1, 6, 10.0), life("1", 5, 9, 19.0)],
    "learner-1": [life("0", 1, 6, 10.5), life("1", 5, 9, 19.5)],
}
FACTS = ElasticFacts(
    settings={"seq_len": 5, "batch": 2, "learners": 2, "pace": 0.0},
    seed=1,
    plan={"kill": "learner:3s", "pause": "none"},
    learners=2,
    step_tokens=10,
    checkpoint_every_s=4.0,
    began_s=10.0,
    ended_s=25.0,
    steps=STEPS,
    result={"global_val_loss": 2.0, "steps": 9, "tokens": 180, "restarts": 1},
    strikes=(Struck(Manner.KILL, Party.LEARNER, "learner-0", 16.6, 17.6),),
)


def test_a_step_made_again_is_no_progress() -> None:
    assert firsts(STEPS) == {1: 11.5, 2: 12.5, 3: 13.5, 4: 14.5, 5: 15.5, 6: 16.5, 7: 22.5, 8: 23.5, 9: 24.5}
    assert firsts({"a": [life("0", 1, 2, 0.0)], "b": [life("0", 1, 1, 0.0)]}) == {1: 1.0}, "one rank is not done yet"


def test_the_report_tells_what_of_the_work_is_in_the_final_parameters() -> None:
    report = build_elastic(FACTS)
    assert (report["verdict"], report["restarts"]) == ("pass", 1)
    assert report["kills"] == dict.fromkeys(Party, 0) | {"learner": 1}
    assert report["ledger"]["line"] == "220 trained = 180 in the final parameters + 40 made again"
    assert report["useful"] == {"tokens": 180, "per_s": pytest.approx(12.0)}
    assert report["longest_standstill_s"] == pytest.approx(6.0)
    assert report["goodput"]["merged_share"] == pytest.approx(180 / 220)
    assert report["goodput"]["trained_share"] == pytest.approx(22 / 30)
    assert "began again 1 times" in summary(report)
    assert "# Chaos: PASS" in markdown(report, "diloco chaos", "timeline.png")
    json.dumps(report)


@pytest.mark.parametrize(
    ("given", "promise"),
    [
        ({"agent_ending": "agent ended with status 1"}, "the ranks end in order"),
        ({"left_running": ["process 7: python"]}, "no process is left over"),
        ({"result": None}, "the run comes to its end"),
        ({"result": FACTS.result | {"steps": 20}}, "every step of the final model was made"),  # type: ignore[operator]
    ],
)
def test_a_broken_promise_of_the_baseline_is_named(given: dict[str, Any], promise: str) -> None:
    report = build_elastic(replace(FACTS, **given))
    assert report["verdict"] == "fail"
    assert promise in summary(report)


# --- side by side ------------------------------------------------------------------------------------------


def run(method: str, per_s: float, alone: float | None, **given: Any) -> dict[str, Any]:
    report = build_elastic(FACTS) | {"method": method, "useful": {"tokens": 1, "per_s": per_s}} | given
    return report if alone is None else report | {"undisturbed": {"useful": {"per_s": alone}, "global_val_loss": 1.9}}


def test_goodput_is_what_strikes_leave_of_a_methods_own_speed() -> None:
    found = compare([run("diloco", 90, 100), run("data-parallel", 30, 120)])
    assert [column["goodput"] for column in found["columns"]] == [0.9, 0.25]
    assert found["differences"] == []
    text = "\n".join(table(found))
    assert "| goodput: struck / undisturbed | 90.0% | 25.0% |" in text
    assert "differ" not in text


def test_runs_that_differ_in_more_than_their_method_are_told_of() -> None:
    other = run("data-parallel", 30, None, seed=2, settings={"batch": 4}, plan={"kill": "learner:9s"})
    found = compare([run("diloco", 90, 100), other])
    assert found["columns"][1]["goodput"] is None
    differ = {text.split(":")[0] for text in found["differences"]}
    assert differ == {"batch", "learners", "pace", "seed", "seq_len", "strikes"}
    assert "The runs differ in more than their method: " in table(found)[-1]


def test_an_earlier_report_is_read_or_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(build_elastic(FACTS)))
    assert read_report(good)["method"] == "data-parallel"
    for text in ("[1]", "{}", "no JSON"):
        bad.write_text(text)
        with pytest.raises(UsageError, match="no report of `diloco chaos`"):
            read_report(bad)


def test_the_undisturbed_run_has_no_strikes_and_ends_at_the_same_point_of_its_schedule() -> None:
    settings = load(ChaosProcess, {"tokens": "1000", "kill": "redis:3s", "cut": "learner:2s", "lose_tail": "true"})
    quiet = calm(settings, {"ledger": {"tokens": 500, "merged": 350, "overwritten": 50, "died": 100}})
    assert (quiet.kill, quiet.cut, quiet.lose_tail, quiet.tokens) == ("none", "none", False, 800)
    baseline = load(ChaosProcess, {"tokens": "1000", "method": "data-parallel"})
    assert calm(baseline, {"ledger": {"tokens": 500, "merged": 350}}).tokens == 1000, "its steps are those of no strike"


# --- the ranks ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="`diloco chaos` is for Linux")
def test_a_rank_is_struck_in_its_present_life_and_another_process_never(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as process:
        file = tmp_path / "learner-0"
        rank = Rank("learner-0", file, SimpleNamespace(pid=process.pid))  # type: ignore[arg-type]
        stranger = Rank("learner-0", file, SimpleNamespace(pid=os.getpid() + 1))  # type: ignore[arg-type]
        assert not rank.alive, "it has not begun"
        file.write_text(str(process.pid))
        assert Ranks([rank]).named("learner") == [rank]
        assert (rank.alive, stranger.alive) == (True, False)
        stranger.kill_group()
        rank.send(signal.SIGSTOP)
        file.write_text("")  # as while the next life writes it
        rank.send(signal.SIGCONT)
        assert process.poll() is None
        file.write_text(str(process.pid))
        rank.kill_group()
        assert process.wait() == -signal.SIGKILL
        rank.kill_group()  # nobody is there


async def test_the_ranks_are_as_far_as_the_last_of_them(tmp_path: Path) -> None:
    alive = SimpleNamespace(alive=True)
    folder = Folder(tmp_path)
    watch = Watch(folder, alive, 2, until_step=3)  # type: ignore[arg-type]

    def steps(name: str, *made: int) -> None:
        (folder.learners / name).mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"step": step}) + "\n" for step in made)
        (folder.learners / name / "losses.jsonl").write_text(lines + '{"step": 99')

    steps("learner-0", 1, 2, 3)
    assert watch.newest() is None
    steps("learner-1")
    assert watch.newest() is None
    steps("learner-1", 1, 2)
    assert watch.newest() == 2
    alive.alive = False
    await watch.follow()
    assert watch.ended.is_set()
