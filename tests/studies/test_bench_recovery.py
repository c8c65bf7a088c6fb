"""Promises about how the recovery bench reads, averages and draws runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import typer

from diloco.launcher.folder import plain
from diloco.options import DemoProcess
from diloco.pipeline.settings import load
from diloco_studies.bench.recovery import WAYS, Trial, make_run, read_trial, span_mean, table
from diloco_studies.bench.recovery_plot import draw, mean_curve, smooth


def loss(incarnation: str, step: int, unix_s: float, value: float) -> dict[str, Any]:
    return {"incarnation": incarnation, "step": step, "unix_s": unix_s, "progress": 0.5, "loss": value}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run whose learner-1 was killed after 2 steps and came back at 100 s for 3."""
    for name in ("learners/learner-0", "learners/learner-1", "logs"):
        (tmp_path / name).mkdir(parents=True)
    mine = [loss("a", 1, 10.0, 5.0), loss("a", 2, 11.0, 4.0)]
    mine += [loss("b", step, 99.0 + step, 3.0 - step / 10) for step in (1, 2, 3)]
    others = [loss("c", step, 95.0 + step, 2.0) for step in range(1, 9)]
    for name, lines in (("learner-1", mine), ("learner-0", others)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"learners/{name}/losses.jsonl").write_text(text + '{"incarnation": "cut')
    log = [
        {"event": "moments_recovered", "source": "peer", "timestamp": "1970-01-01T00:01:38Z"},
        {"event": "learner_joined", "timestamp": "1970-01-01T00:01:37.5Z"},
    ]
    (tmp_path / "logs/learner-1.log").write_text("no json\n" + "".join(json.dumps(line) + "\n" for line in log))
    report = {
        "events": [
            {"name": "learner_killed", "who": "learner-1", "tokens": 40},
            {"name": "learner_started", "who": "learner-1", "tokens": 50},
        ],
        "evaluations": [{"tokens": 0, "loss": 5.5}, {"tokens": 100, "loss": 2.5}],
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    return tmp_path


def test_a_run_is_split_at_the_kill(folder: Path) -> None:
    trial = read_trial(folder, "peer", 0, "learner-1")
    assert (trial.before, trial.after) == ((5.0, 4.0), (2.9, 2.8, 2.7))
    assert trial.other == (2.0,) * 4
    assert trial.source == "peer"
    assert trial.join_s == pytest.approx(2.5)
    assert (trial.killed_tokens, trial.restarted_tokens, trial.final_loss) == (40, 50, 2.5)


def test_a_run_that_ended_before_the_restart_is_said_so(folder: Path) -> None:
    path = folder / "learners/learner-1/losses.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ValueError, match="no step after its restart"):
        read_trial(folder, "peer", 0, "learner-1")


def test_a_run_of_other_settings_is_not_taken_for_the_one_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table would be an old one; the same settings again are the same run."""
    path = folder / "report.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "settings": {"tokens": 400, "state_every": 2.0}}))
    make_run(folder, {"tokens": 400, "state_every": 2.0})
    assert "there already" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        make_run(folder, {"tokens": 800, "state_every": 2.0})
    assert "tokens=400, not 800" in capsys.readouterr().err


def test_the_settings_asked_for_are_those_that_a_run_reports(tmp_path: Path) -> None:
    """Through the file and back, in the report's own form."""
    asked = {"seed": 3, "lr": 4e-3, "state_every": 2.0, "eval_every": 3.0, "log_losses": True, **WAYS["fresh, no ramp"]}
    asked |= {"kill_learner": 1, "kill_at": 0.4, "restart_at": 0.5}
    config = tmp_path / "asked.toml"
    config.write_text(tomli_w.dumps(asked))
    reported = plain(load(DemoProcess, config=config))
    assert {name: reported[name] for name in asked} == asked


def test_means_are_over_whole_spans_only() -> None:
    assert span_mean([1.0, 2.0, 3.0], 2, 3) == 2.5
    assert span_mean([1.0, 2.0, 3.0], 2, 4) is None
    assert smooth([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]
    assert mean_curve([[1.0, 2.0, 3.0], [3.0, 4.0]]) == [2.0, 3.0]


def test_table_and_picture_show_every_way(folder: Path, tmp_path: Path) -> None:
    trials = []
    for way in ("peer", "fresh, no ramp"):
        one = read_trial(folder, way, 0, "learner-1")
        longer = {name: tuple(getattr(one, name)) * 40 for name in ("before", "after", "other")}
        fields = {name: getattr(one, name) for name in Trial.__dataclass_fields__}
        trials.append(Trial(**{**fields, **longer}))
    lines = table(trials).splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("| peer | 4.50 | 2.82 | 2.80 |")
    assert lines[3].startswith("| fresh, no ramp (1 of 1 not, but from peer) | 4.50 |")
    assert len({line.count("|") for line in lines}) == 1
    draw(trials, tmp_path / "deep/picture.png")
    assert (tmp_path / "deep/picture.png").read_bytes()[:4] == b"\x89PNG"
