"""`diloco bench kills` for real, in small: machines are killed under each method, and nothing is left running."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_studies.bench.kills.plan import METHODS
from diloco_studies.strikes.evidence import left_running
from tests.parties import ROOT, environment, wait_for
from tests.system.test_processes import QUICK, diloco

pytestmark = [
    pytest.mark.slow,
    pytest.mark.redis,
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc"),
]

SMALL = ["--machines", "2", "--tokens", "400k", "--every", "9s", "--away", "3s", "--pace", "100ms", "--within", "2m"]


def test_each_method_spends_the_budget_under_the_same_kills(tmp_path: Path) -> None:
    done = diloco("bench", "kills", "--out", tmp_path, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in METHODS}
    assert all(one["finished"] and one["tokens"]["final"] > 0 for one in found.values())
    assert all(one["curve"][-1][2] < 3.5 for one in found.values()), "it learns"
    killed = [[kill["machine"] for kill in found[name]["kills"]] for name in ("decoupled", "elastic", "data-parallel")]
    common = min(map(len, killed))
    assert common >= 1
    assert killed[0][:common] == killed[1][:common] == killed[2][:common]
    assert found["undisturbed"]["kills"] == []
    assert found["decoupled"]["broken"] == []
    longest_s = max(one["length_s"] for one in found["data-parallel"]["interruptions"])
    assert longest_s > 3, "it waits for its machine"
    assert (tmp_path / "kills.png").stat().st_size > 5000
    assert "held-out loss" in done.stdout
    again = diloco("bench", "kills", "--out", tmp_path, *SMALL)
    assert again.stdout.count("already has a result") == len(METHODS), again.stdout + again.stderr


def test_ctrl_c_leaves_no_process_and_no_result(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diloco", "bench", "kills", "--out", str(tmp_path), "--only", "elastic", *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(**QUICK), cwd=ROOT) as running:
        wait_for(lambda: list(tmp_path.glob("elastic/learners/*/losses.jsonl")))
        assert left_running(running.pid, set()), "there is something to be ended"
        running.send_signal(signal.SIGINT)
        assert "stopped in elastic: repeat the command to continue" in running.stdout.read()
    assert running.returncode == 130
    assert left_running(running.pid, set()) == []
    assert not (tmp_path / "elastic.json").exists()
