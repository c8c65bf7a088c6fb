"""The jobs of `deploy/slurm` without a Slurm: with a real Redis, and programs that end as the test says."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from diloco.pipeline.bus.embedded import free_port
from tests import HANGING_S
from tests.parties import ROOT, environment, wait_for

PROGRAMS = {
    "diloco": """#!/bin/bash
echo "$1 $$" >> started
if [ "$1" = acl ]; then
  printf 'REDIS_%s_PASSWORD=x\\n' LEARNER SYNCER EVALUATOR > secrets.env
  exec echo 'user default on nopass ~* +@all'
fi
status=$(sed -n 1p "$1.ends" 2> /dev/null)
[ -z "$status" ] || { sed -i 1d "$1.ends"; exit "$status"; }
trap 'exit 75' TERM
while :; do sleep 0.1; done
""",
    "scontrol": '#!/bin/sh\necho "scontrol $*" >> started\n',
    "hostname": "#!/bin/sh\necho 127.0.0.1\n",
    "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
}


class Folder:
    """A folder in which jobs run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: list[subprocess.Popen[bytes]] = []
        (path / "bin").mkdir()
        for name, text in PROGRAMS.items():
            (path / "bin" / name).write_text(text)
            (path / "bin" / name).chmod(0o755)

    def start(self, job: str, after_s: float = 0.1) -> "subprocess.Popen[bytes]":
        """Start a job. after_s: pause before a party is started again."""
        given = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "9", "AFTER_S": str(after_s)}
        given |= {"DILOCO_REDIS_PORT": str(free_port()), "PATH": f"{self.path / 'bin'}:{os.environ['PATH']}"}
        command = ["bash", str(ROOT / "deploy/slurm" / job)]
        self.jobs.append(subprocess.Popen(command, cwd=self.path, env=environment(**given), start_new_session=True))
        return self.jobs[-1]

    def begun(self, what: str) -> list[str]:
        """The calls of a program, or starts of a party, each with its process."""
        file = self.path / "started"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix(f"{what} ") for line in lines if line.startswith(f"{what} ")]

    def until(self, true: Callable[[], object]) -> None:
        wait_for(true, shown=lambda: (self.path / "started").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    found = Folder(tmp_path)
    yield found
    for job in found.jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def with_server(folder: Folder) -> None:
    (folder.path / "secrets.env").write_text("REDIS_LEARNER_PASSWORD=x\n")
    (folder.path / "redis.at").write_text("127.0.0.1:1")


def test_a_learner_whose_time_is_over_before_there_is_a_server_is_requeued(folder: Folder) -> None:
    job = folder.start("learner.sbatch")
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(1.5)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(HANGING_S) == 75
    assert folder.begun("scontrol") == ["requeue 7_3"]
    assert not folder.begun("learner")


def test_a_learner_that_crashes_or_is_killed_is_started_again(folder: Folder) -> None:
    with_server(folder)
    (folder.path / "learner.ends").write_text("1\n137\n")
    job = folder.start("learner.sbatch")
    folder.until(lambda: len(folder.begun("learner")) == 3)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(HANGING_S) == 75
    assert folder.begun("scontrol") == ["requeue 7_3"]


@pytest.mark.parametrize(("ends", "status", "starts"), [("0", 0, 1), ("2", 2, 1), ("1\n" * 30, 1, 21)])
def test_a_learner_that_is_done_or_refused_or_always_fails_ends_its_job(
    folder: Folder, ends: str, status: int, starts: int
) -> None:
    with_server(folder)
    (folder.path / "learner.ends").write_text(ends)
    assert folder.start("learner.sbatch").wait(HANGING_S) == status
    assert len(folder.begun("learner")) == starts
    assert not folder.begun("scontrol")


def redis_of(folder: Folder) -> set[int]:
    """Processes of the job's Redis."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder.path / "redis":
                found.add(int(process.name))
    return found


def test_whichever_of_the_server_job_dies_is_started_again(folder: Folder) -> None:
    (folder.path / "evaluator.ends").write_text("1\n")
    (folder.path / "syncer.ends").write_text("1\n")
    job = folder.start("server.sbatch")
    folder.until(lambda: len(folder.begun("syncer")) == len(folder.begun("evaluator")) == 2)
    (redis,) = redis_of(folder)
    os.kill(redis, signal.SIGKILL)
    folder.until(lambda: redis_of(folder) - {redis})
    assert len(folder.begun("syncer")) == 2

    job.send_signal(signal.SIGUSR1)
    assert job.wait(HANGING_S) == 75
    assert folder.begun("scontrol") == ["requeue 9"]
    assert not redis_of(folder)
    assert not (folder.path / "redis.at").exists()


def test_a_server_whose_time_is_over_while_its_syncer_is_to_be_started_again_starts_none(folder: Folder) -> None:
    sleep = folder.path / "bin" / "sleep"
    sleep.write_text('#!/bin/sh\n[ "$1" != 3 ] || echo "pause $$" >> started\nexec /bin/sleep "$@"\n')
    sleep.chmod(0o755)
    (folder.path / "syncer.ends").write_text("1\n")
    job = folder.start("server.sbatch", after_s=3)
    folder.until(lambda: folder.begun("pause"))
    job.send_signal(signal.SIGUSR1)
    assert job.wait(HANGING_S) == 1
    assert len(folder.begun("syncer")) == 1
    assert folder.begun("scontrol") == ["requeue 9"]
