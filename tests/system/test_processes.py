"""Whole runs as processes: real Redis, real syncer, real training, small budgets."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco.launcher.locate import locate
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import DilocoError
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.settings import BusSettings
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.tape import read_archive
from tests import HANGING_S
from tests.parties import ROOT, environment, is_running, wait_for

pytestmark = [pytest.mark.slow]

SMALL = ["--fragments", "4", "--sync-interval", "6", "--seq-len", "64", "--batch", "4"]
QUICK = {"DILOCO_EVAL_EVERY": "500ms", "DILOCO_EVAL_TOKENS": "2048"}


def diloco(*arguments: object, limit_s: float = HANGING_S) -> subprocess.CompletedProcess[str]:
    """A command, run to its end."""
    command = [sys.executable, "-m", "diloco", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, env=environment(**QUICK), cwd=ROOT, check=False
    )


class Run:
    """`diloco run`, or `diloco demo`, in the background."""

    def __init__(self, out: Path, *arguments: object, name: str = "run") -> None:
        self.out = out
        small = SMALL if "data-parallel" not in arguments else SMALL[SMALL.index("--seq-len") :]  # it has no fragments
        command = [sys.executable, "-m", "diloco", name, "--out", str(out), *small, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**QUICK), cwd=ROOT
        )

    @property
    def pids(self) -> dict[str, int]:
        return json.loads((self.out / "run.json").read_text())["pids"]

    def status(self) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            place = locate(BusSettings(), self.out)
            async with open_bus(place.redis_url, place.run) as bus:
                return await read_status(bus, LoopClock())

        return asyncio.run(read())

    def reaches(self, tokens: int) -> None:
        """Wait until so many tokens are trained and something is merged."""

        def there() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            try:
                status = self.status()
            except DilocoError:
                return False  # not started yet
            return status["tokens"] >= tokens and status["outer_steps"] > 0

        wait_for(there)

    def end(self, status: int = 0) -> str:
        """Wait for its end; returns what it printed."""
        output, _ = self.process.communicate(timeout=HANGING_S)
        assert self.process.returncode == status, output
        return output

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.out / "report.json").read_text())

    def left_nothing_running(self) -> None:
        pids = self.pids
        assert {"launcher", "redis", "syncer", "evaluator", "learner-0"} <= set(pids)
        wait_for(lambda: not any(is_running(pid) for pid in pids.values()))


@contextmanager
def started(out: Path, *arguments: object, name: str = "run") -> Iterator[Run]:
    run = Run(out, *arguments, name=name)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two learners, at its end."""
    folder = tmp_path_factory.mktemp("finished")
    with started(folder / "out", "--learners", 2, "--tokens", 60_000, "--json-report", folder / "copy.json") as run:
        run.end()
    return run


def test_the_loss_falls_and_the_run_leaves_all_it_promised(finished: Run) -> None:
    report = finished.report
    first = report["evaluations"][0]["loss"]
    assert report["global_val_loss"] < first - 1.0, "the global parameters hardly learned"
    assert report["tokens"] >= 60_000
    assert report["merged_tokens"] <= report["tokens"]
    assert report["tokens_lost"]["unaccounted"] == report["tokens_lost"]["died"] == 0
    assert report["merged_tokens"] + sum(report["tokens_lost"].values()) == report["tokens"]
    assert [row["id"] for row in report["learners"]] == ["learner-0", "learner-1"]
    assert sum(row["tokens"] for row in report["learners"]) == report["tokens"]
    assert report["stopped"] is False
    assert report["evaluations"][-1]["final"]
    assert json.loads((finished.out.parent / "copy.json").read_text()) == report
    assert (finished.out / "loss.png").stat().st_size > 10_000
    assert (finished.out / "sample.txt").read_text().startswith("def ")
    finished.left_nothing_running()


def test_every_command_can_look_at_a_finished_run(finished: Run, tmp_path: Path) -> None:
    status = diloco("status", finished.out, "--json")
    assert json.loads(status.stdout)["global_val_loss"] == finished.report["global_val_loss"]
    tape = diloco("tape", finished.out, "--json")
    merges = [line for line in map(json.loads, tape.stdout.splitlines()) if line["kind"] == "committed"]
    assert len([merge for merge in merges if merge["version"] > 0]) == finished.report["outer_steps"]
    sampled = diloco("sample", finished.out, "--prompt", "class ", "--tokens", 20)
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("class ")
    exported = diloco("export", finished.out, tmp_path / "model.safetensors")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model.safetensors").stat().st_size > 100_000


def test_a_killed_learner_does_not_stop_the_others_and_can_come_back(tmp_path: Path) -> None:
    kill = ["--kill-learner", 1, "--kill-at", 0.3, "--restart-at", 0.5]
    with started(tmp_path / "out", "--learners", 3, "--tokens", 90_000, "--pace", "100ms", *kill, name="demo") as run:
        output = run.end()
    report = run.report
    demo = report["demo"]
    assert "killed with SIGKILL" in output
    assert demo["ratio_while"] > 0  # how much it is, on a machine that others use too, says nothing
    assert demo["others_lost"] == {"died": 0, "unaccounted": 0}
    assert 0 <= demo["run_lost"]["died"] <= demo["run_lost"]["trained_tokens"]
    assert report["tokens_lost"]["unaccounted"] == 0
    rows = {row["id"]: row for row in report["learners"]}
    assert rows["learner-1"]["incarnations"] == 2
    assert rows["learner-0"]["left"]
    marked = [event["name"] for event in report["events"] if event["name"] in ("learner_killed", "learner_started")]
    assert marked == ["learner_killed", "learner_started"]
    gone_s, back_s = (event["elapsed_s"] for event in report["events"] if event["name"] in marked)
    goodput, time_s = report["goodput"]["since_start"], report["goodput"]["learners"]["learner-1"]["seconds"]
    assert time_s["away"] > back_s - gone_s, "what it takes a process to get as far as to join is part of it"
    assert goodput["goodput"] + sum(goodput["badput"].values()) == pytest.approx(1)
    page = run.out / "report.html"
    assert output.splitlines()[-1] == f"page       {page.as_uri()}"
    shown = json.loads((run.out / "page.json").read_text())
    assert shown["learners"]["learner-1"]["lives"] == 2
    assert {("killed", "learner-1"), ("started again", "learner-1")} <= {(m["what"], m["who"]) for m in shown["marks"]}
    assert shown["totals"]["tokens"] == report["tokens"]
    assert '"run":"run"' in page.read_text()
    run.left_nothing_running()


def test_a_killed_learner_is_started_at_once_when_nobody_else_is_left(tmp_path: Path) -> None:
    """Without it there would be no progress, hence no end."""
    kill = ["--kill-learner", 0, "--kill-at", 0.2, "--restart-at", 0.99, "--pace", "50ms"]
    with started(tmp_path / "out", "--learners", 2, "--tokens", 60_000, *kill, name="demo") as run:
        run.reaches(12_000)
        wait_for(lambda: not is_running(run.pids["learner-0"]))
        os.kill(run.pids["learner-1"], signal.SIGKILL)
        run.end()
    assert run.report["tokens"] >= 60_000
    assert run.report["demo"]["restarted_at"] < 0.99
    run.left_nothing_running()


def test_a_learner_that_dies_by_itself_is_noted_and_the_run_goes_on(tmp_path: Path) -> None:
    with started(tmp_path / "out", "--learners", 2, "--tokens", 60_000) as run:
        run.reaches(15_000)
        os.kill(run.pids["learner-1"], signal.SIGKILL)
        output = run.end()
    assert "learner-1 was killed by SIGKILL" in output
    assert "learner_died" in [event["name"] for event in run.report["events"]]
    assert run.report["tokens"] >= 60_000
    assert run.report["tokens_lost"]["unaccounted"] == 0
    run.left_nothing_running()


def test_a_learner_added_mid_run_takes_part(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    slow = ["--pace", "1s"]  # so that it is under way when a late learner has started, on a busy machine too
    with started(tmp_path / "out", "--learners", 1, "--tokens", 80_000, "--redis-port", port, *slow) as run:
        run.reaches(4_000)
        late = diloco("learner", "--redis-url", f"redis://127.0.0.1:{port}", "--learner-id", "late", "--threads", 1)
        assert late.returncode == 0, late.stdout + late.stderr
        run.end()
    assert [row["id"] for row in run.report["learners"]] == ["late", "learner-0"]
    merged = [record for record in read_archive(run.out / "tape") if isinstance(record, Committed)]
    assert any(part.learner == "late" for record in merged for part in record.contributions)
    assert run.report["tokens_lost"]["unaccounted"] == 0


def test_a_stopped_run_ends_cleanly_and_can_be_resumed(tmp_path: Path) -> None:
    """Ctrl-C keeps all that was learned, and the loss goes on from there."""
    with started(tmp_path / "first", "--learners", 2, "--tokens", 2_000_000) as first:
        first.reaches(40_000)
        first.process.send_signal(signal.SIGINT)
        told = first.end()
    before = first.report
    assert "all processes have ended; writing text, plot and report" in told
    assert before["stopped"] is True
    assert 40_000 <= before["tokens"] < 1_000_000
    assert before["tokens_lost"]["unaccounted"] == 0
    assert before["evaluations"][-1]["final"]
    assert Path(before["checkpoint"]).is_dir()
    first.left_nothing_running()

    budget = before["tokens"] + 30_000
    with started(tmp_path / "second", "--learners", 2, "--tokens", budget, "--resume", first.out) as second:
        told = second.end()
    after = second.report
    assert f"resumed from {before['checkpoint']}, after " in told
    for name in ("learner-0", "learner-1"):
        said = (second.out / "logs" / f"{name}.log").read_text()
        assert '"source": "checkpoint", "event": "moments_recovered"' in said, "its moments lay beside the checkpoints"
        assert f"{name} continues with its saved moments" in told
    assert after["resumed_from"]["tokens"] == before["tokens"]
    assert after["tokens"] >= budget
    assert before["tokens"] < after["evaluations"][0]["tokens"] + 30_000
    assert after["evaluations"][0]["loss"] < before["evaluations"][0]["loss"] - 0.5, "it began from scratch"
    assert after["global_val_loss"] < before["global_val_loss"] + 0.05
    assert after["merged_tokens"] <= after["tokens"]
    assert after["outer_steps"] > before["outer_steps"]

    spent = diloco("run", "--out", tmp_path / "third", "--resume", second.out)
    assert spent.returncode == 2
    assert "pass a larger one with --tokens" in spent.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="what a killed launcher leaves ends on Linux only")
def test_a_run_whose_machine_dies_is_resumed_from_its_last_checkpoint(tmp_path: Path) -> None:
    """All its processes are killed at once, Redis too: no report, and only what came since is trained again."""
    many = ["--learners", 2, "--tokens", 2_000_000]
    with started(tmp_path / "first", *many, "--checkpoint-every", "1s") as first:
        first.reaches(20_000)
        saved = wait_for(lambda: any((first.out / "checkpoints").glob("*/latest")) and first.out)
        first.process.kill()
        first.process.communicate()
    first.left_nothing_running()
    assert not (first.out / "report.json").exists()
    told = diloco("status", first.out)
    assert told.returncode == 2
    assert f"repeat the command with --out {first.out}" in told.stderr

    trained = load_checkpoint(saved).state.tokens
    assert trained > 0
    budget = trained + 30_000
    with started(tmp_path / "second", "--learners", 2, "--tokens", budget, "--resume", first.out) as second:
        second.end()
    assert second.report["resumed_from"]["tokens"] == trained
    assert second.report["tokens"] >= budget
    assert second.report["tokens_lost"]["unaccounted"] == 0


def test_a_run_stopped_before_its_first_step_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path / "out", "--learners", 2) as run:
        wait_for(lambda: (run.out / "run.json").exists())
        run.process.send_signal(signal.SIGINT)
        output = run.end()
    assert "nothing to save" in output
    run.left_nothing_running()


@pytest.mark.parametrize("wait_s", [0.0, 2.0])
def test_a_baseline_stopped_before_its_first_step_ends_at_once(tmp_path: Path, wait_s: float) -> None:
    """While its ranks load, or look for each other."""
    with started(tmp_path / "out", "--method", "data-parallel", "--learners", 2) as run:
        wait_for(lambda: (run.out / "run.json").exists())
        time.sleep(wait_s)
        run.process.send_signal(signal.SIGINT)
        output = run.end()
    assert "nothing to save" in output


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    with started(tmp_path / "out", "--learners", 2, "--tokens", 2_000_000) as run:
        run.reaches(5_000)
        run.process.send_signal(signal.SIGINT)
        assert any("Ctrl-C again" in line for line in run.process.stdout), "the first one was not heard"
        run.process.send_signal(signal.SIGINT)
        output = run.end(1)
    assert "second signal" in output
    assert "Traceback" not in output
    run.left_nothing_running()


def test_a_child_that_dies_at_the_start_ends_the_run_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "nothing-here").mkdir()
    with started(tmp_path / "out", "--data", tmp_path / "nothing-here") as run:
        output = run.end(1)
    assert "nothing-here" in output
    assert "Last lines of" in output
    assert "Traceback" not in output
    assert not (run.out / "report.json").exists()
    run.left_nothing_running()


def test_a_syncer_that_dies_ends_the_run(tmp_path: Path) -> None:
    with started(tmp_path / "out", "--learners", 1, "--tokens", 2_000_000) as run:
        run.reaches(2_000)
        os.kill(run.pids["syncer"], signal.SIGKILL)
        output = run.end(1)
    assert "syncer was killed by SIGKILL" in output
    run.left_nothing_running()


def test_the_baseline_runs_from_the_same_command(tmp_path: Path) -> None:
    arguments = ["--method", "data-parallel", "--learners", 2, "--tokens", 60_000]
    with started(tmp_path / "out", *arguments) as run:
        run.end()
    report = run.report
    assert report["method"] == "data-parallel"
    assert report["tokens"] == report["merged_tokens"] >= 60_000
    assert report["global_val_loss"] < 4.0
    assert [row["device"] != "auto" for row in report["learners"]] == [True, True]
    assert report["wall_s"] > report["learners"][0]["wall_s"], "the start of the processes counts, as for diloco"
    assert diloco("export", run.out, tmp_path / "model.safetensors").returncode == 0


def test_a_finished_run_is_left_as_it_is(finished: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.out.rglob("*")}
    again = diloco("run", "--out", finished.out)
    assert again.returncode == 0
    assert "--overwrite" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in finished.out.rglob("*")} == before


def test_a_recorded_run_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    """Every merge of a real run, made again from its recording in another process."""
    arguments = ["--learners", 2, "--tokens", 40_000, "--record-deltas", "deltas"]
    with started(tmp_path / "out", *arguments) as run:
        run.end()
    replayed = diloco("tape", "--replay", run.out / "deltas", "--json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    outcome = json.loads(replayed.stdout)
    assert outcome["merges"] == outcome["made_again"] == run.report["outer_steps"] > 10
    assert outcome["fragments"] == 4
    assert outcome["differences"] == []
    victim = sorted((run.out / "deltas" / "2").glob("*.merge"))[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    replayed = diloco("tape", "--replay", run.out / "deltas")
    assert replayed.returncode == 1
    assert f"differs: fragment 2 version {victim.name.split('-')[0]}: the delta of learner-" in replayed.stdout
