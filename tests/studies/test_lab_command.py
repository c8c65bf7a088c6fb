"""`diloco lab` at the command line: what is done once, what fails alone, what is kept, and that no process is left."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.pipeline.errors import DilocoError
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco_studies.quality import sweep
from diloco_studies.quality.experiment import read_experiment
from diloco_studies.quality.results.store import Store
from diloco_studies.quality.settings import LabRun
from tests import HANGING_S
from tests.studies.test_lab_results import result
from tests.studies.test_lab_settings import SWEEP

ROOT = Path(__file__).resolve().parents[2]


def lab(*arguments):
    return [sys.executable, "-m", "diloco", "lab", *map(str, arguments)]


def alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def ends(group):
    """All of it, soon: the last to go is Python's own tracker of what processes share."""
    until = time.monotonic() + HANGING_S
    while alive(group) and time.monotonic() < until:
        time.sleep(0.2)
    assert not alive(group)


@pytest.fixture
def begun(popen):
    def start(file, out, jobs="1"):
        """A sweep that leads a group of its own."""
        command = lab("run", file, "--out", out, "--jobs", jobs)
        return popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)

    return start


def first_result(process, out):
    """Wait for it."""
    until = time.monotonic() + HANGING_S
    while not list(out.glob("*.json")) and time.monotonic() < until:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)


def workers(parent):
    """Processes that it has started for runs."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(one) for one in children if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


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
def test_runs_are_done_once_and_a_failed_one_is_named(text, tmp_path):
    """Three runs of which one cannot be: two results; the second time only that one is tried."""
    given = {"method": "data-parallel", "learners": [1, 2], "model": "nano", "experts": 4}
    file, out = tiny(tmp_path, text, **given, experts_a_token=2), tmp_path / "out"
    done = subprocess.run(lab("run", file, "--out", out), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 to do" in done.stderr
    assert len(list(out.glob("*.json"))) == 2
    file = tiny(tmp_path, text, **given, experts_a_token=[2, 3])
    again = subprocess.run(lab("run", file, "--out", out), cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "4 runs, 2 to do" in again.stderr
    assert "it must divide 256" in again.stderr
    assert len(list(out.glob("*.json"))) == 2
    shown = subprocess.run(lab("report", file, "--out", out), cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.stdout.count("not run") == 2
    assert "learners=2, experts_a_token=2 | " in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_or_a_closed_terminal_keeps_what_is_done(number, text, tmp_path, begun):
    """The long run is given up within a step, the short one's result is there, nothing else is, and no process.

    The status says that the same command is to be given again.
    """
    file, out = tiny(tmp_path, text, method="single", steps=[4, 1_000_000]), tmp_path / "out"
    process = begun(file, out)
    first_result(process, out)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=HANGING_S)
    assert process.returncode == AGAIN_STATUS
    assert "1 done, 0 failed, 1 left" in errors
    assert "Traceback" not in errors
    assert [path.suffix for path in out.iterdir()] == [".json"]
    ends(process.pid)


@pytest.mark.slow
def test_a_process_that_the_system_killed_costs_the_runs_under_way_alone(text, tmp_path, begun):
    """They are named, with why that may have been, and no process of theirs is left; the others are done."""
    file, out = tiny(tmp_path, text, method="single", steps=[4, 1_000_000, 1_000_001, 5, 6]), tmp_path / "out"
    process = begun(file, out, "2")
    first_result(process, out)
    time.sleep(5)
    os.kill(workers(process.pid)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=HANGING_S)
    assert process.returncode == 1
    said = " ".join(errors.split())
    for steps in (1_000_000, 1_000_001):
        assert f"failed tiny, steps={steps}, seed 0: in progress when a process was killed, perhaps because" in said
    assert "3 done, 2 failed, 0 left" in said
    assert len(list(out.glob("*.json"))) == 3
    ends(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "a second Ctrl-C", "a parent that was killed"])
def test_no_process_is_left_of_a_sweep(how, text, tmp_path, begun):
    """Also where a run does not look whether it is to end: here it has been stopped. Others are not begun yet."""
    file, out = tiny(tmp_path, text, method="single", steps=[4, *range(10**6, 10**6 + 4)]), tmp_path / "out"
    process = begun(file, out)
    first_result(process, out)
    if how == "a parent that was killed":
        process.kill()
    else:
        for worker in workers(process.pid):
            os.kill(worker, signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        if how == "a second Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=HANGING_S)
    assert process.returncode != 0
    assert "Traceback" not in errors
    assert how != "Ctrl-C" or process.returncode == AGAIN_STATUS
    ends(process.pid)


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


@pytest.mark.parametrize(("command", "text"), [("run", "packages"), ("report", "english")])
def test_text_that_is_not_there_is_said_with_the_command_that_makes_it(command, text, tmp_path, monkeypatch, capsys):
    """The project's own experiments ask for it."""
    monkeypatch.chdir(tmp_path)
    assert main(["lab", command, str(tiny(tmp_path, f"{text}-text"))]) == 2
    assert f"data='{text}-text': no such folder here; create it with `diloco lab {text}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_found_out_before_the_first_run(text, tmp_path, capsys):
    """Here a file; nothing was trained."""
    assert main(["lab", "run", str(tiny(tmp_path, text)), "--out", str(text)]) == 2
    assert f"--out {text} cannot be written" in capsys.readouterr().err


def test_an_error_that_nobody_expected_is_one_run_s_alone(text, tmp_path, monkeypatch):
    """Of training or of writing the result: it is named, and raised into nobody's sweep."""

    def refuse(*_):
        raise OSError(28, "No space left on device")

    pytest.importorskip("torch")
    monkeypatch.setattr(sweep, "_stop", threading.Event())
    monkeypatch.setattr(sweep, "_news", queue.Queue())
    monkeypatch.setattr("diloco_studies.quality.engine.train", lambda *_: result(1.0))
    with monkeypatch.context() as full:
        full.setattr(Store, "write", refuse)
        failed = sweep._train(0, LabRun(data=str(text)), tmp_path / "out", "cpu")
    assert isinstance(failed, DilocoError)
    assert str(failed) == "OSError: [Errno 28] No space left on device"
    monkeypatch.setattr("diloco_studies.quality.engine.train", lambda *_: [][1])
    failed = sweep._train(0, LabRun(data=str(text)), tmp_path / "out", "cpu")
    assert str(failed) == "IndexError: list index out of range"


def test_text_that_changes_during_a_sweep_makes_the_next_run_another(text, tmp_path, monkeypatch):
    """Though the same process does it: its result is not kept as one of the text before."""
    pytest.importorskip("torch")
    monkeypatch.setattr(sweep, "_stop", threading.Event())
    monkeypatch.setattr(sweep, "_news", queue.Queue())
    monkeypatch.setattr("diloco_studies.quality.engine.train", lambda *_: result(1.0))
    run, out = LabRun(data=str(text)), tmp_path / "out"
    assert sweep._train(0, run, out, "cpu") == result(1.0)
    text.write_text(text.read_text() + "one more line\n")
    assert sweep._train(1, run, out, "cpu") == result(1.0)
    assert len(list(out.glob("*.json"))) == 2


@pytest.mark.parametrize("command", ["run", "report"])
def test_two_experiments_of_one_name_are_refused(command, tmp_path, capsys):
    """Their lines of a CSV could not be told apart."""
    other = tmp_path / "other" / "trial.toml"
    other.parent.mkdir()
    for file in (tmp_path / "trial.toml", other):
        file.write_text(SWEEP)
    assert main(["lab", command, str(tmp_path / "trial.toml"), str(other)]) == 2
    assert f"have the same name: {tmp_path / 'trial.toml'}, {other}" in capsys.readouterr().err
