"""Real runs under real strikes: processes are killed, and every promise is kept."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diloco.launcher.launch import environment
from diloco.pipeline.errors import DilocoError
from diloco_studies.strikes.spawner import Spawner
from tests import HANGING_S
from tests.parties import ROOT, wait_for
from tests.parties import environment as clean_environment
from tests.system.test_processes import QUICK, SMALL, diloco

pytestmark = [
    pytest.mark.slow,
    pytest.mark.redis,
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc"),
]

KILLS = ["--kill", "learner:4s,syncer:8s,redis:15s", "--lease-s", "2s"]


def chaos(out: Path, *arguments: object) -> dict[str, Any]:
    done = diloco("chaos", "--out", out, "--learners", 2, "--json", out.parent / "c.json", *SMALL, *arguments)
    assert (out.parent / "c.json").exists(), done.stdout + done.stderr
    report: dict[str, Any] = json.loads((out.parent / "c.json").read_text())
    assert report["violations"] == [], done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: PASS" in done.stdout
    return report


def test_a_run_under_kills_keeps_every_promise(tmp_path: Path) -> None:
    report = chaos(tmp_path / "out", *KILLS, "--for", "40s", "--seed", 6)
    assert report["verdict"] == "pass"
    assert report["kills"]["learner"] >= 5
    assert report["kills"]["syncer"] >= 1
    assert report["kills"]["redis"] >= 1
    assert report["commits"] > 0
    assert report["rewinds"] == report["commits_lost_with_redis"] == 0
    ledger = report["ledger"]
    assert ledger["tokens"] == sum(ledger[t] for t in ("merged", "overwritten", "rejected", "died", "pending"))
    for name in ("chaos.md", "timeline.png", "chaos.json", "report.json"):
        assert (tmp_path / "out" / name).stat().st_size > 500
    assert json.loads((tmp_path / "out" / "chaos.json").read_text()) == report


def test_a_redis_that_loses_its_last_second_breaks_no_promise(tmp_path: Path) -> None:
    report = chaos(
        tmp_path / "out", "--kill", "redis:5s", "--lose-tail", "--for", "25s", "--seed", 2, "--lease-s", "2s"
    )
    assert report["kills"]["redis"] >= 2
    assert any("bytes of its file" in strike["detail"] for strike in report["timeline"]["strikes"])


def test_pauses_cuts_and_hangs_break_no_promise(tmp_path: Path) -> None:
    plan = [
        "--kill",
        "none",
        "--pause",
        "learner:6s/2s,syncer:9s/3s",
        "--cut",
        "learner:5s,redis:9s",
        "--hang",
        "syncer:8s",
    ]
    report = chaos(tmp_path / "out", *plan, "--for", "25s", "--seed", 9, "--lease-s", "2s")
    assert all(sum(report["strikes"][manner].values()) for manner in ("pause", "cut", "hang"))


def test_a_run_that_is_stopped_is_audited_all_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diloco", "chaos", "--out", str(tmp_path / "out"), "--learners", "2", *SMALL]
    command += [*KILLS, "--for", "200s"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=clean_environment(**QUICK), cwd=ROOT, **pipes) as process:
        wait_for(lambda: "learner_joined" in _logs(tmp_path / "out"))
        time.sleep(5)  # some of it under strikes
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=HANGING_S)
    assert "verdict" in output or "nothing was struck" in output
    assert "Traceback" not in output


def _logs(out: Path) -> str:
    return "".join(file.read_text(errors="replace") for file in out.glob("logs/learner-*.log"))


# --- the spawner -------------------------------------------------------------------------------------------


def test_what_is_forked_is_ours_with_its_own_log_environment_and_group(tmp_path: Path) -> None:
    with Spawner(environment(1, None), tmp_path / "spawner.log", "stdlib") as spawner:
        spawner.wait_until_ready()
        process = spawner.fork(["--version"], environment(1, None), tmp_path / "one.log")
        assert process.wait() == 0
        assert "diloco" in (tmp_path / "one.log").read_text()
        failed = spawner.fork(["learner"], environment(1, None), tmp_path / "two.log")
        assert failed.wait() == 2, "no Redis"
        waiting = spawner.fork(["learner"], environment(1, "redis://127.0.0.1:1"), tmp_path / "three.log")
        assert os.getpgid(waiting.pid) == waiting.pid
        os.killpg(waiting.pid, signal.SIGKILL)  # at once: the group is there as soon as the pid is known
        assert waiting.wait() == -signal.SIGKILL
        os.kill(spawner.pid, signal.SIGKILL)
        with pytest.raises(DilocoError, match="has ended"):
            spawner.fork(["--version"], environment(1, None), tmp_path / "one.log")


def test_a_struck_run_stands_beside_itself_undisturbed(tmp_path: Path) -> None:
    report = chaos(tmp_path / "out", "--kill", "learner:5s", "--for", "12s", "--seed", 3, "--undisturbed")
    other = report["undisturbed"]
    assert other["verdict"] == "pass"
    assert other["ledger"]["merged"] >= 0.9 * report["ledger"]["merged"]
    row = next(row for row in report["bounds"] if "undisturbed" in row["what"])
    assert row["measured"] == pytest.approx(report["global_val_loss"] / other["global_val_loss"])
    assert "## The same run undisturbed" in (tmp_path / "out" / "chaos.md").read_text()
