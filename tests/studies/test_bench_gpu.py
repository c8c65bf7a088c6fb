"""`diloco bench gpu`: which pieces are done, what survives an interruption, and one small piece for real."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco import cli
from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.models.sizes import SIZES
from diloco_studies.bench.end_to_end import PYTHONPATH
from diloco_studies.bench.gpu import command, running
from diloco_studies.bench.gpu.pieces import EXPERIMENTS, LAB, Figures, NoFigures, Piece, plan, said, summary, to_do
from diloco_studies.bench.gpu.running import do, do_all, read_results
from diloco_studies.quality.experiment import read_experiment
from tests import HANGING_S

ROOT = Path(__file__).resolve().parents[2]
WRITE = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"


def figure(folder: Path) -> Figures:
    return {"figure": int((folder / "figure").read_text())}


def piece(name: str, *codes: str, figures: Callable[[Path], Figures] = figure) -> Piece:
    """Of Python programs, to which the folder's path is the first argument."""
    return Piece(name, f"about {name}", tuple(("-c", code, "FOLDER/figure", "7") for code in codes), figures)


GOOD = piece("good", WRITE)
BAD = piece("bad", "import sys; print('words'); sys.exit('error: no room')", WRITE)
EMPTY = piece("empty", "pass")
OTHER = piece("other", WRITE)
OK = {"status": "ok"}


@pytest.mark.parametrize("rehearsal", [False, True])
def test_the_plan_is_whole(rehearsal: bool, tmp_path: Path) -> None:
    """A rehearsal has the same pieces, and none of its commands names a GPU.

    Each experiment can be read, small too.
    """
    pieces = plan(rehearsal, 8)
    names = [one.name for one in pieces]
    assert names == ["text", *LAB, "kill", "speed-bf16", "speed-fp32", "encoding", "tests", "ranks"]
    words = " ".join(" ".join(command) for one in pieces for command in one.commands)
    assert ("cuda" in words) is not rehearsal
    experiments = [one for one in pieces if one.name in LAB]
    for one in experiments:
        ((file, text),) = one.files.items()
        (tmp_path / file).write_text(text)
        experiment = read_experiment(tmp_path / file)
        variants = {row.variant for row in read_experiment(EXPERIMENTS / file).rows}
        assert {row.variant for row in experiment.rows} == variants
        assert len(experiment.runs) == len(variants) or not rehearsal
        assert all(run.model in SIZES for run in experiment.runs)


def test_what_cannot_be_done_yet_is_said_and_not_counted() -> None:
    waiting = Piece("waiting", "about it", (), figure, waits_for="a file")
    assert to_do([waiting, GOOD], {"good": OK}) == []
    assert "| waiting | about it |  | waits for a file |" in summary([waiting, GOOD], {}, False)


def test_ranks_wait_for_several_gpus() -> None:
    (one,) = (one for one in plan(False, 1) if one.name == "ranks")
    assert one.waits_for == "a machine with several GPUs"
    (all_of_8,) = (one for one in plan(False, 8) if one.name == "ranks")
    assert [("--batch", "128") for _ in all_of_8.commands] == [
        command[command.index("--batch") :][:2] for command in all_of_8.commands
    ]


def test_a_failed_piece_is_said_with_its_reason_and_the_others_still_run(tmp_path: Path) -> None:
    """All three kinds of failure: a command's status, no figures, and figures that say that nothing was measured."""

    def nothing(folder: Path) -> Figures:
        raise NoFigures("all 3 tests were skipped")

    pieces = [BAD, EMPTY, piece("skipped", WRITE, figures=nothing), GOOD]
    results = do_all(pieces, pieces, tmp_path, "cpu", {}, lambda one, result: None)
    assert [results[one.name]["status"] for one in pieces] == ["failed", "failed", "failed", "ok"]
    assert said(results["bad"]).startswith("failed: error: no room (status 1;")
    assert "FileNotFoundError" in said(results["empty"])
    assert said(results["skipped"]) == "failed: all 3 tests were skipped"
    assert said(results["good"]) == "figure 7"
    assert not (tmp_path / "bad" / "figure").exists()  # what comes after a failure is not begun
    assert read_results(tmp_path, pieces, True) == results
    page = (tmp_path / "summary.md").read_text()
    assert "error: no room" in page
    assert "A rehearsal" in page


def test_a_piece_that_takes_too_long_is_ended_and_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LIMIT_S", 1.0)
    slow = piece("slow", "import time; time.sleep(600)")
    assert "took longer than 1 s" in do(slow, tmp_path, "cpu", True)["reason"]


def test_a_piece_whose_time_is_over_keeps_the_figures_that_it_has_and_goes_on_with_them(tmp_path: Path) -> None:
    """It is asked to end, and writes what it can; the next call finds its folder as it was."""
    code = """
import pathlib, sys, time
file, before = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]).exists()
file.write_text("8" if before else "7")
try:
    time.sleep(0 if before else 600)
except KeyboardInterrupt:
    file.with_name("left").touch()
"""
    commands = (("-c", code, "FOLDER/figure"),)
    one = Piece("long", "about it", commands, figure, goes_on=True)
    first = do(one, tmp_path, "cpu", True, 5.0)
    assert said(first).startswith("failed: it took longer than 5 s; its output: ")
    assert said(first).endswith("; until then: figure 7")
    assert (tmp_path / "long" / "left").exists()
    assert said(do(one, tmp_path, "cpu", True)) == "figure 8"


def test_no_piece_is_begun_when_time_is_nearly_over(tmp_path: Path) -> None:
    assert do_all([GOOD], [GOOD], tmp_path, "cpu", {}, lambda one, result: None, running.BEGIN_S - 1) == {}
    assert do_all([GOOD], [GOOD], tmp_path, "cpu", {}, lambda one, result: None, 600.0)["good"]["status"] == "ok"


def test_the_summary_says_what_is_to_do_and_names_the_device() -> None:
    results = {"good": {"status": "ok", "seconds": 12.3, "figures": {"GB/s": 1.23456}, "device": "H100"}}
    page = summary([GOOD, OTHER], results, False)
    assert "| good | about good | 12 | GB/s 1.235 |" in page
    assert "| other | about other |  | to do |" in page
    assert "Device: H100." in page
    assert "rehearsal" not in page.lower()


def test_rehearsed_and_measured_results_never_share_a_folder(tmp_path: Path) -> None:
    do(GOOD, tmp_path, "cpu", True)
    with pytest.raises(UsageError, match="holds rehearsed results: choose a different --out"):
        read_results(tmp_path, [GOOD], False)


@pytest.mark.parametrize("written", [b'{"piece": "go', b"{}", b"\xff\0"])
def test_a_result_that_cannot_be_read_is_said_and_done_again(written: bytes, tmp_path: Path, capsys: Any) -> None:
    """As a machine leaves it that went off while it was written."""
    good = do(GOOD, tmp_path, "cpu", True)
    (tmp_path / "other.json").write_bytes(written)
    results = read_results(tmp_path, [GOOD, OTHER], True)
    assert results == {"good": good}
    assert "other.json cannot be read" in capsys.readouterr().err
    assert [one.name for one in to_do([GOOD, OTHER], results)] == ["other"]
    assert "| other | about other |  | to do |" in summary([GOOD, OTHER], results, True)


CALL = """
import sys
from pathlib import Path
from diloco_studies.bench.gpu.pieces import Piece
from diloco_studies.bench.gpu.running import do_all, read_results
from tests.studies.test_bench_gpu import GOOD, OTHER, piece
HANGS = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
pieces = [GOOD, piece("hangs", HANGS), OTHER]
folder = Path(sys.argv[1])
do_all(pieces, pieces, folder, "cpu", read_results(folder, pieces, True), lambda one, result: None)
"""


def gone(pid: int) -> bool:
    """It has ended; one that nobody has waited for yet has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_it_leaves_nothing_running_and_goes_on_with_the_piece_under_way(
    number: signal.Signals, tmp_path: Path, popen: Callable[..., Any]
) -> None:
    process = popen([sys.executable, "-c", CALL, str(tmp_path)], cwd=ROOT, env=os.environ | {"PYTHONPATH": PYTHONPATH})
    figure, until = tmp_path / "hangs" / "figure", time.monotonic() + HANGING_S
    while not (figure.is_file() and figure.read_text()):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(HANGING_S) != 0
    while not gone(int(figure.read_text())):
        assert time.monotonic() < until
        time.sleep(0.05)
    pieces = [GOOD, piece("hangs", WRITE), OTHER]
    results = read_results(tmp_path, pieces, True)
    assert list(results) == ["good"]
    again = do_all(pieces, to_do(pieces, results), tmp_path, "cpu", dict(results), lambda one, result: None)
    assert again["good"] == results["good"]
    assert [again[name]["figures"] for name in ("hangs", "other")] == [{"figure": 7}] * 2


def test_the_command_goes_on_and_its_status_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """1 while a piece has failed or is to do, 0 once all have ended well; what is done is not done again."""
    pieces = [GOOD, BAD]
    monkeypatch.setattr(command, "plan", lambda rehearsal, gpus: pieces)
    call = ["bench", "gpu", "--rehearse", "--out", str(tmp_path)]
    assert cli.main([*call, "--only", "good"]) == 1
    assert cli.main(call) == 1
    assert "bad: failed: error: no room" in capsys.readouterr().out
    pieces[1] = piece("bad", WRITE)
    assert cli.main(call) == 0
    assert "2 pieces, 1 to do" in capsys.readouterr().out
    assert cli.main([*call, "--only", "else"]) == 2
    assert "one of good, bad" in capsys.readouterr().err


def test_without_a_gpu_it_says_how_to_rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "out"
    assert cli.main(["bench", "gpu", "--out", str(out)]) == 2
    assert "--rehearse" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("speed-bf16", {"tokens/s", "alone", "step() ms"}),
        pytest.param("ranks", {"ranks", "ddp", "fsdp"}),
        ("gpu-paper-outer", {"the paper's, seed 0", "data-parallel, seed 0"}),
    ],
)
def test_a_piece_is_rehearsed_for_real(name: str, figures: set[str], tmp_path: Path) -> None:
    """By the program's own commands, on the CPU: its figures are read from what they leave."""
    (one,) = (one for one in plan(True, 1) if one.name == name)
    result = do(one, tmp_path, "cpu", True)
    assert result["reason"] == ""
    assert set(result["figures"]) == figures
    assert json.loads((tmp_path / f"{name}.json").read_text()) == result
