"""The report of a struck run: its keys, its verdict, its picture; and what is read from logs and /proc."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import main
from diloco.launcher.report import Outcome
from diloco.pipeline.process.signals import LAUNCHER_PID
from diloco.pipeline.settings import load
from diloco_studies.strikes import sampling
from diloco_studies.strikes.audit import Ending, Evidence
from diloco_studies.strikes.command import calm
from diloco_studies.strikes.evidence import (
    left_running,
    read_shard_notes,
    read_shards_per_epoch,
    read_step_times,
)
from diloco_studies.strikes.footprint import lines, rows
from diloco_studies.strikes.plot import draw, stretches
from diloco_studies.strikes.rates import Struck
from diloco_studies.strikes.report import Facts, build_chaos, markdown, summary
from diloco_studies.strikes.schedule import Manner, Party
from diloco_studies.strikes.settings import ChaosProcess
from tests.studies.test_chaos_audit import GOOD, HISTORY, killed

STEPS = {"a": [("1" * 8, [10 + i / 10 for i in range(40)])], "b": [("2" * 8, [11 + i / 10 for i in range(30)])]}


def facts(evidence: Evidence) -> Facts:
    outcome = Outcome(
        settings={"method": "diloco", "seed": 3, "run": "run", "learners": 2},
        stopped=True,
        wall_s=4.0,
        elapsed_s=4.0,
        outer_steps=2,
        started_unix_s=10.0,
        layout=evidence.layout,
        records=evidence.records,
        ledger_inputs=evidence.ledger_inputs,
    )
    return Facts(
        outcome=outcome,
        seed=3,
        plan={"kill": "learner:3s"},
        began_s=10.0,
        ended_s=14.0,
        steps=STEPS,
        learners=2,
        lease_s=5.0,
        sync_interval=10,
    )


def built(**given: Any) -> dict[str, Any]:
    evidence = replace(GOOD, **given)
    return build_chaos(facts(evidence), evidence)


STRIKES = (
    killed(Party.LEARNER, "a", 10.5, 10.7),
    killed(Party.REDIS, "redis", 11.5, 12.5),
    Struck(Manner.PAUSE, Party.SYNCER, "syncer-0", 12.2, 12.8),
)


def test_each_failover_is_told_with_the_time_without_a_commit() -> None:
    report = built(strikes=(*STRIKES, replace(killed(Party.PRIMARY, "redis-0", 12.4, 13.5), detail="redis-1")))
    (failover,) = report["failovers"]
    assert failover["kind"] == "kill redis-primary"
    assert failover["taken_over_s"] == pytest.approx(1.1)
    assert failover["without_merges_s"] == pytest.approx(2.0)  # from the last commit to the end of the strikes
    text = markdown(report, "diloco chaos", "timeline.png")
    assert "| 2.4 s | kill redis-primary | redis-0 | 1.1 s | 2.0 s | redis-1 |" in text
    assert "kill redis-primary at 2.4 s (redis-0): taken over after 1.1 s, 2.0 s without a commit" in summary(report)


def test_a_run_that_kept_its_promises_passes_with_all_that_was_measured() -> None:
    report = built(strikes=STRIKES)
    assert report["verdict"] == "pass"
    assert report["violations"] == []
    nobody = dict.fromkeys(Party, 0)
    assert report["kills"] == nobody | {"learner": 1, "redis": 1}
    assert report["strikes"]["pause"] == nobody | {"syncer": 1}
    assert report["failovers"] == []
    assert report["commits"] == 2
    assert report["longest_commit_gap_s"] == pytest.approx(2.0)
    assert report["gaps_by_strike"]["any_fragment"]["kill learner"]["alone_s"] == pytest.approx(1.0)
    assert report["step_rates"]["redis"]["during"] == pytest.approx(10.0)
    assert report["ledger"]["merged"] == report["ledger"]["tokens"] == 150
    assert report["keys"]["deltas"] == {"keys": 1, "entries": 2, "bytes": 300, "most_keys": 2, "most_entries": 16}
    assert "| deltas | 1 (2) | 2 (16) | 0 |" in markdown(report, "diloco chaos", "timeline.png")
    assert report["goodput"]["trained_share"] == pytest.approx(70 * 0.1 / 8)
    json.dumps(report)


def test_a_broken_promise_is_named_everywhere() -> None:
    report = built(endings=(Ending("learner-0", "ended with status 1"),))
    assert report["verdict"] == "fail"
    for text in (summary(report), markdown(report, "diloco chaos", "timeline.png")):
        assert "FAIL" in text
        assert "nobody ends but by a strike or in order" in text
        assert "learner-0 ended with status 1" in text


def test_commits_that_redis_lost_are_not_counted() -> None:
    lost = HISTORY[2].model_copy(update={"digest": bytes([9]) * 16, "unix_s": 11.5})
    report = built(
        records=(*HISTORY[:2], lost, HISTORY[2]), strikes=(killed(Party.REDIS, "r", 11.6, 11.9),), tail_lost=True
    )
    assert (report["verdict"], report["commits"], report["commits_lost_with_redis"]) == ("pass", 2, 1)


def test_a_run_without_strikes_or_steps_has_a_report_too() -> None:
    report = built()
    assert summary(report).splitlines()[0] == "struck for 0:04: no strike"
    empty = replace(facts(GOOD), steps={}, ended_s=10.0)
    assert build_chaos(empty, GOOD)["goodput"]["share"] == 0.0


def test_a_machine_too_busy_to_measure_on_is_told_of() -> None:
    report = build_chaos(replace(facts(GOOD), late_s=12.0), GOOD)
    assert report["verdict"] == "pass"
    assert "12.0 s late" in summary(report)
    assert "12.0 s late" not in summary(built())


def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    draw(
        STEPS, STRIKES, [(11.0, 0), (12.0, 1)], ["a", "b", "syncer-0", "redis"], (10.0, 14.0), "title", "foot", picture
    )
    assert picture.stat().st_size > 10_000


def test_stretches_of_training_end_where_it_was_silent() -> None:
    assert stretches([1.0, 1.5, 2.0, 9.0, 9.5]) == [(1.0, 1.0), (9.0, 0.5)]
    assert stretches([]) == []


# --- what is read ------------------------------------------------------------------------------------------


def log_line(**fields: Any) -> str:
    return json.dumps({"timestamp": "2026-01-02T03:04:05.5Z", "level": "debug", **fields})


def test_a_learners_log_tells_which_shards_it_claimed_and_read(tmp_path: Path) -> None:
    """Also where SIGKILL cut a line, and the next life's first one stands behind it."""
    log = tmp_path / "learner-1.log"
    told = {"consumer": "learner-1.0a", "epoch": 0, "shard": 4}
    lines = [
        log_line(event="epoch_queued", epoch=0, shards=12),
        log_line(event="shard_claimed", position=0, **told),
        log_line(event="shard_read", **told)[:30] + log_line(event="shard_read", **told),
        "not JSON at all",
    ]
    log.write_text("\n".join(lines) + "\n")
    notes = read_shard_notes(tmp_path)
    assert [(note.consumer, note.index, note.read) for note in notes] == [
        ("learner-1.0a", 4, False),
        ("learner-1.0a", 4, True),
    ]
    assert notes[0].unix_s == 1767323045.5
    assert read_shards_per_epoch(tmp_path) == 12


def test_step_times_are_kept_apart_by_incarnation(tmp_path: Path) -> None:
    (tmp_path / "learner-0").mkdir()
    lines = [
        {"incarnation": life, "step": 1, "unix_s": at, "loss": 1.0} for life, at in (("a", 1.0), ("a", 2.0), ("b", 5.0))
    ]
    (tmp_path / "learner-0" / "losses.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_step_times(tmp_path) == {"learner-0": [("a", [1.0, 2.0]), ("b", [5.0])]}
    assert read_step_times(tmp_path / "nobody") == {}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_process_that_is_left_over_is_found() -> None:
    environ = {**os.environ, LAUNCHER_PID: "4242"}
    command = [sys.executable, "-c", "print(flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environ, **pipes, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it has its environment by now
            assert any(str(process.pid) in text for text in left_running(4242, set()))
            assert left_running(4242, {process.pid}) == []
        finally:
            process.kill()
    assert left_running(4242, set()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kill", "worker:3s"], "learner, syncer, redis"),
        (["--kill", "learner:3s", "--lose-tail"], "--lose-tail needs --kill redis"),
        (["--for", "ever"], "--for 'ever'"),
        (["--for", "10ms"], "at least 1s"),
        (
            ["--quorum", "9"],
            "with learners=4 there would never be a merge; use more --learners or a smaller --quorum\n",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_anything_is_started(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["chaos", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_undisturbed_run_has_no_strikes_and_ends_at_the_same_point_of_its_schedule() -> None:
    settings = load(ChaosProcess, {"tokens": "1000", "kill": "redis:3s", "cut": "learner:2s", "lose_tail": "true"})
    quiet = calm(settings, {"ledger": {"tokens": 500, "merged": 350, "overwritten": 50, "died": 100}})
    assert (quiet.kill, quiet.cut, quiet.lose_tail, quiet.tokens) == ("none", "none", False, 800)


def test_processes_are_sampled_for_as_long_as_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SAMPLE_S", 0.01)
    monkeypatch.setattr(sampling, "JUDGED_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        footprints = sampling.Footprints(lambda: {"here": os.getpid(), "child": child.pid})

        async def follow() -> None:
            following = asyncio.create_task(footprints.follow())
            await asyncio.sleep(0.3)
            child.kill()
            await asyncio.sleep(0.3)
            assert sampling.take(child.pid) is None  # nobody has waited for it
            following.cancel()

        asyncio.run(follow())
    here, gone = footprints.judged()
    assert (here.name, gone.name) == ("here", "child")
    assert here.length_s > gone.length_s + 0.1
    assert here.samples[-1][1]["MB"] > 10
    assert any("| here |" in line for line in lines(rows([here])))
