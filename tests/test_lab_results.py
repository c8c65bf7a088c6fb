"""What was run is not run again, what another code gave is not taken for this one's, and the report says both."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos.lab import source
from chaos.lab.report import as_json, markdown, table_of
from chaos.lab.settings import LabRun, read_experiment
from chaos.lab.store import Store, code_of, settings_digest
from diloco.cli import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(4000)))
    return path


def result(value, **more):
    points = [
        {"tokens": n, "merged_tokens": n, "virtual_s": n, "train_loss": 1.0, "measures": {"value": value + 1 / n}}
        for n in (1, 2, 3)
    ]
    return {
        "measure": "loss",
        "higher_is_better": False,
        "final": {"value": value},
        "points": points,
        "virtual_s": 3600.0,
        "goodput": 0.5,
        "merged_share": 0.9,
        "wall_s": 1.0,
        **more,
    }


# --- the store --------------------------------------------------------------------------------------------


def test_a_result_is_found_by_settings_data_and_code(text, tmp_path, monkeypatch):
    """Another setting, a changed text or changed code, and it is not done; `any_code` shows the old one."""
    store, run = Store(tmp_path / "out"), LabRun(data=str(text))
    assert store.read(run) is None
    store.write(run, {"final": 1})
    assert store.read(run) == {"final": 1}
    assert store.read(run.model_copy(update={"lr": 1.0})) is None
    monkeypatch.setattr("chaos.lab.store.code_digest", lambda module: "other")
    assert store.read(run) is None
    assert store.read(run, any_code=True) == {"final": 1}
    monkeypatch.setattr("chaos.lab.store.data_fingerprint", lambda run: "other")
    assert store.read(run, any_code=True) is None


def test_a_result_is_whole_or_not_there(text, tmp_path):
    """Nothing but results lies in the folder afterwards."""
    store, run = Store(tmp_path / "out"), LabRun(data=str(text))
    with pytest.raises(TypeError):
        store.write(run, {"final": object()})
    assert store.read(run) is None
    store.write(run, {"final": 1})
    assert [path.suffix for path in store.folder.iterdir()] == [".json"]


def test_the_text_itself_is_part_of_a_run(text):
    """Not only its path: with other contents it is another run."""
    before = settings_digest(LabRun(data=str(text)))
    other = text.with_name("other.txt")
    other.write_text(text.read_text() + "one more line\n")
    assert settings_digest(LabRun(data=str(other))) != before


def test_the_code_that_decides_is_found_by_its_imports():
    """The protocol decides a decoupled run and not a data-parallel one; neither depends on tables and pictures."""
    ours, loop = source.closure("chaos.lab.decoupled"), source.closure("chaos.lab.synchronous")
    assert {"syncer.window", "syncer.outer", "workers.rounds", "pipeline.memory", "chaos.lab.text"} <= ours
    assert {"workers.models.gpt", "workers.schedule", "chaos.lab.schedule"} <= loop
    assert not {"syncer.window", "workers.rounds"} & loop
    assert not {"workers.learner", "workers.trainer", "pipeline.redis_streams", "chaos.world"} & (ours | loop)
    assert not {"chaos.lab.report", "chaos.lab.plot", "chaos.lab.sweep", "diloco.lab"} & (ours | loop)
    assert code_of(LabRun()) != code_of(LabRun(method="single")) == code_of(LabRun(method="data-parallel"))


def test_words_about_code_do_not_make_it_another(tmp_path):
    """Comments, docstrings and line breaks; a changed number does."""
    file = tmp_path / "module.py"

    def meaning(text):
        file.write_text(text)
        return source._meaning(file)

    plain = meaning('"""A."""\nX = 1\n"""What X is."""\ndef f():\n    """Does."""\n    return X\n')
    assert meaning("X = 1  # more\n\n\ndef f():\n    return (\n        X\n    )\n") == plain
    assert meaning("X = 2\ndef f():\n    return X\n") != plain


# --- the report -------------------------------------------------------------------------------------------


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "trial.toml"
    path.write_text(
        """
        question = "Which?"
        reference = "dp"
        best_of = ["lr"]
        [settings]
        seed = [0, 1, 2]
        lr = [1e-3, 2e-3]
        [[variants]]
        name = "dp"
        method = "data-parallel"
        [[variants]]
        name = "ours"
        """
    )
    return read_experiment(path)


def told(experiment, values):
    """Results by variant and rate: a value a seed."""
    return [
        (run, result(values[row.variant, run.lr][run.seed]) if (row.variant, run.lr) in values else None)
        for row in experiment.rows
        for run in row.runs
    ]


def test_the_table_has_medians_spreads_and_the_distance_to_the_reference_s_best(experiment):
    """Best of the sweep first; what was not run is marked, and is nobody's best."""
    values = {("dp", 1e-3): (2.0, 2.1, 2.5), ("dp", 2e-3): (1.9, 2.0, 1.95), ("ours", 2e-3): (2.0, 2.145, 2.2)}
    table = table_of(experiment, told(experiment, values))
    written = markdown(table)
    best = written.split("All:")[0]
    assert "| dp, lr=0.002 | 1.9500 | 0.0500 | 3 | +0.00 % | 90.0 % | 50.0 % | 1.00 |" in best
    assert "| ours, lr=0.002 | 2.1450 | 0.1033 | 3 | +10.00 % |" in best
    assert "lr=0.001" not in best
    assert "| ours, lr=0.001 | not run | | 0 of 3 | | | | |" in " ".join(written.split("  "))
    rows = as_json(table)["rows"]
    assert [row["median"] for row in rows] == [2.1, 1.95, None, 2.145]
    assert [row["best"] for row in rows] == [False, True, False, True]


def test_where_more_is_better_the_best_is_the_highest(experiment):
    """Accuracies."""
    values = {("dp", 1e-3): (0.5, 0.5, 0.5), ("dp", 2e-3): (0.9, 0.9, 0.9)}
    found = [(run, one and one | {"higher_is_better": True}) for run, one in told(experiment, values)]
    assert [line.mid for line in table_of(experiment, found).best() if line.done] == [0.9]


def test_an_experiment_that_was_not_run_is_reported_as_such(experiment, tmp_path, capsys):
    """No error, no figure."""
    assert main(["lab", "report", str(tmp_path / "trial.toml"), "--out", str(tmp_path / "none")]) == 0
    written = capsys.readouterr().out
    assert written.count("not run") == 6
    assert "### trial" in written


def test_the_picture_is_drawn(experiment, tmp_path):
    """With one row unfinished and curves of different length."""
    plot = pytest.importorskip("chaos.lab.plot")
    found = told(experiment, {("dp", 1e-3): (2.0, 2.1, 2.5), ("ours", 2e-3): (2.0, 2.1, 2.2)})
    found[0][1]["points"].pop()
    plot.draw([table_of(experiment, found), table_of(experiment, [])], tmp_path / "trial.png")
    assert (tmp_path / "trial.png").stat().st_size > 10_000


# --- the command ------------------------------------------------------------------------------------------


def lab(*arguments):
    return [sys.executable, "-m", "diloco", "lab", *map(str, arguments)]


def alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def tiny(tmp_path, text, **told):
    path = tmp_path / "tiny.toml"
    given = {
        "data": str(text),
        "batch": 1,
        "seq_len": 8,
        "steps": 4,
        "learners": 2,
        "evaluations": 2,
        "eval_tokens": 64,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in {**given, **told}.items()]
    path.write_text("[settings]\n" + "\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_are_done_once_and_a_failed_one_is_named(text, tmp_path):
    """Three runs of which one cannot be: two results; the second time only that one is tried."""
    file, out = tiny(tmp_path, text, method="data-parallel", learners=[1, 2], model="tiny"), tmp_path / "out"
    done = subprocess.run(lab("run", file, "--out", out), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 to do" in done.stderr
    assert len(list(out.glob("*.json"))) == 2
    file = tiny(tmp_path, text, method="data-parallel", learners=[1, 2], model=["tiny", "no-such"])
    again = subprocess.run(lab("run", file, "--out", out), cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "4 runs, 2 to do" in again.stderr
    assert "no such size" in again.stderr
    assert len(list(out.glob("*.json"))) == 2
    shown = subprocess.run(lab("report", file, "--out", out), cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.stdout.count("not run") == 2
    assert "learners=2, model=tiny | " in shown.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_or_a_closed_terminal_keeps_what_is_done(number, text, tmp_path):
    """The long run is given up within a step, the short one's result is there, nothing else is, and no process."""
    file, out = tiny(tmp_path, text, method="single", steps=[4, 1_000_000]), tmp_path / "out"
    process = subprocess.Popen(
        lab("run", file, "--out", out, "--jobs", "1"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 240
    while not list(out.glob("*.json")) and time.monotonic() < until:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "1 done, 0 failed, 1 left" in errors
    assert "Traceback" not in errors
    assert [path.suffix for path in out.iterdir()] == [".json"]
    until = time.monotonic() + 60  # the last to go is Python's own tracker of what processes share
    while alive(process.pid) and time.monotonic() < until:
        time.sleep(0.2)
    assert not alive(process.pid)


def test_the_experiments_of_the_documentation_can_be_read():
    """Each file, and the page names it."""
    page = (ROOT / "docs" / "results" / "quality.md").read_text()
    files = sorted((ROOT / "docs" / "quality").glob("*.toml"))
    assert len(files) >= 12
    for file in files:
        assert read_experiment(file).runs
        assert f"quality/{file.name}" in page, f"{file.name} is not in docs/results/quality.md"


def test_a_bad_file_is_a_usage_error(tmp_path, capsys):
    """Status 2, and the reason."""
    assert main(["lab", "run", str(tmp_path / "none.toml")]) == 2
    assert "cannot read experiment" in capsys.readouterr().err


@pytest.mark.parametrize("command", [(), ("run",), ("report",), ("settings",)])
def test_help_is_there(command, capsys):
    """Of the group and of each of its commands."""
    assert main(["lab", *command, "--help"]) == 0
    assert "Usage: diloco lab" in capsys.readouterr().out
