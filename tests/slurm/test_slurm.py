"""The jobs of `deploy/slurm` on a real Slurm of one node (`tests/slurm/local.py`)."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.embedded import free_port
from tests.parties import ROOT, ends_of_logs, environment, wait_for
from tests.slurm.local import LocalSlurm, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
]

JOBS = ROOT / "deploy/slurm"


class Cluster:
    """A Slurm, and the folder of one run on it."""

    def __init__(self, slurm: LocalSlurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder

    def submit(self, job: str, *more: str, **settings: str) -> str:
        """The job's number. settings: DILOCO_* variables."""
        given = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", **settings)
        command = ["sbatch", "--parsable", f"--chdir={self.folder}", *more[:-1], str(JOBS / job), more[-1]]
        said = self.slurm.ask(*command, environ=given)
        assert said.strip().isdecimal(), said
        return said.strip()

    def jobs(self) -> dict[str, tuple[str, int]]:
        """Of all that Slurm knows: state and number of restarts, by JOB or JOB_TASK."""
        found = {}
        for block in self.slurm.ask("scontrol", "show", "job").split("\n\n"):
            said = dict(re.findall(r"(\w+)=(\S+)", block))
            if "JobId" in said:
                task = said.get("ArrayTaskId")
                name = said["JobId"] if task is None else f"{said['ArrayJobId']}_{task}"
                found[name] = said["JobState"], int(said["Restarts"])
        return found

    def at_once(self) -> None:
        """What was requeued may start, where Slurm holds it back for minutes; and for longer than before."""
        for name, (state, _) in self.jobs().items():
            if state == "PENDING":
                self.slurm.ask("scontrol", "update", f"JobId={name}", "StartTime=now", "TimeLimit=20")

    def events(self, log: str) -> list[dict[str, Any]]:
        """What a party has logged, in all of its lives."""
        file = self.folder / log
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def count(self, log: str, event: str) -> int:
        """How often."""
        return sum(one["event"] == event for one in self.events(log))

    def until(self, true: Callable[[], Any]) -> None:
        """Wait, with all that there is to read should it not come."""
        wait_for(true, shown=lambda: f"{self.jobs()}\n{ends_of_logs(self.folder)}\n{self.slurm.told()}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "run").mkdir()
    with LocalSlurm(tmp_path / "slurm") as slurm:
        yield Cluster(slurm, tmp_path / "run")


def test_learners_that_reach_their_time_limit_are_requeued_and_the_run_is_finished(cluster: Cluster) -> None:
    """Slurm tells them a minute before; they leave in order, with 75, and are requeued. They come back under their
    names, from what they had saved, and end with 0 at the run's end, as the server does. One that is cancelled stays
    away."""
    small = {"DILOCO_FRAGMENTS": "4", "DILOCO_SYNC_INTERVAL": "6", "DILOCO_THREADS": "1", "DILOCO_TOKENS": "700k"}
    small |= {"DILOCO_RUN": "slurm", "DILOCO_EVAL_TOKENS": "2048", "DILOCO_REDIS_PORT": str(free_port())}
    server = cluster.submit("server.sbatch", "--time=20", "--run=slurm", **small)
    small |= {"DILOCO_MODEL": "nano", "DILOCO_SEQ_LEN": "64", "DILOCO_BATCH": "4", "DILOCO_PACE": "0.1"}
    array = cluster.submit("learner.sbatch", "--array=0-2", "--time=2", "--run=slurm", **small)
    learners = [f"{array}_{task}" for task in range(3)]
    logs = [f"learner-{task}.log" for task in range(3)]
    cluster.until(lambda: all(cluster.count(log, "training_started") for log in logs))
    cluster.until(lambda: cluster.count("server.log", "fragment_merged"))

    cluster.slurm.ask("scancel", learners[2])
    cluster.until(lambda: all(cluster.jobs()[name][1] for name in learners[:2]))
    cluster.at_once()
    cluster.until(lambda: all(cluster.count(log, "training_started") == 2 for log in logs[:2]))
    for log in logs[:2]:
        reasons = [one["reason"] for one in cluster.events(log) if one["event"] == "training_ended"]
        assert reasons[0] == "signal"
        sources = [one["source"] for one in cluster.events(log) if one["event"] == "moments_recovered"]
        assert sources == ["checkpoint"]

    def over() -> bool:
        cluster.at_once()  # two minutes may not be enough for all of it
        return all(state in ("COMPLETED", "CANCELLED", "FAILED") for state, _ in cluster.jobs().values())

    cluster.until(over)
    ended = cluster.jobs()
    assert ended[server] == ("COMPLETED", 0)
    assert [ended[name][0] for name in learners] == ["COMPLETED", "COMPLETED", "CANCELLED"]
    assert ended[learners[2]][1] == 0
    assert [cluster.events(log)[-1] for log in logs[:2]]
    assert [one["reason"] for one in cluster.events(logs[0]) if one["event"] == "training_ended"][-1] == "run finished"
    assert any((cluster.folder / "checkpoints").glob("*/latest"))


def test_after_the_loss_of_all_but_the_checkpoints_the_same_lines_go_on(cluster: Cluster) -> None:
    """Redis' data lies on the node, say, which is gone. The server's log is one for both lives."""
    small = {"DILOCO_FRAGMENTS": "4", "DILOCO_SYNC_INTERVAL": "6", "DILOCO_THREADS": "1", "DILOCO_TOKENS": "10M"}
    small |= {"DILOCO_RUN": "slurm", "DILOCO_REDIS_PORT": str(free_port()), "DILOCO_CHECKPOINT_EVERY": "5"}
    small |= {"DILOCO_MODEL": "nano", "DILOCO_SEQ_LEN": "64", "DILOCO_BATCH": "4", "DILOCO_PACE": "0.1"}

    def submitted() -> tuple[str, str]:
        server = cluster.submit("server.sbatch", "--time=20", "--run=slurm", **small)
        return server, cluster.submit("learner.sbatch", "--array=0-1", "--time=20", "--run=slurm", **small)

    jobs = submitted()
    cluster.until(lambda: cluster.count("server.log", "checkpoint_saved") >= 2)
    cluster.slurm.ask("scancel", "--signal=KILL", "--full", *jobs)
    cluster.until(lambda: all(state not in ("RUNNING", "COMPLETING") for state, _ in cluster.jobs().values()))
    shutil.rmtree(cluster.folder / "redis")
    merged = cluster.count("server.log", "fragment_merged")
    jobs = submitted()
    cluster.until(lambda: cluster.count("server.log", "fragment_merged") >= merged + 8)
    assert cluster.count("server.log", "checkpoint_restored") == 1
    cluster.slurm.ask("scancel", *jobs)
