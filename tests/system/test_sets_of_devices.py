"""`diloco run` with learners of several ranks, as processes: to its end, with ranks killed, stopped, and refused."""

import os
import signal
import sys
from pathlib import Path

import pytest

from diloco.pipeline.messages.fragment import Committed
from diloco.tape import read_archive
from tests.parties import is_running, wait_for
from tests.system.test_processes import Run, started

pytestmark = [
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
TWO_AND_ONE = ("--learners", 2, "--devices", "cpu+cpu,cpu", "--model", "nano")


def ranks_of(agent: int) -> list[int]:
    """Process ids of the ranks that a learner's process has started."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [pid for pid in map(int, children) if b"learner" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def lives(run: Run) -> int:
    """How often rank 0 of the first learner has joined."""
    return (run.out / "logs/learner-0.log").read_text().count('"event": "learner_joined"')


def train(run: Run, *learners: str) -> None:
    """Wait until all of these do."""
    run.reaches(1)
    wait_for(lambda: {one["id"] for one in run.status()["learners"] if one["step"] > 10} >= {*learners})


def merged_of(run: Run, learner: str) -> set[str]:
    """Incarnations of which something was merged."""
    merges = [record for record in read_archive(run.out / "tape") if isinstance(record, Committed)]
    return {part.incarnation for one in merges for part in one.contributions if part.learner == learner}


def test_a_rank_that_is_killed_comes_back_and_all_end_in_order(tmp_path: Path) -> None:
    """Two learners, one of two ranks, to the budget. A killed rank takes its learner along, which begins again by
    itself, and is merged again. All tokens are accounted for, and no process is left."""
    with started(tmp_path / "out", *TWO_AND_ONE, "--tokens", "400k", "--pace", "50ms") as run:
        train(run, "learner-0", "learner-1")
        ranks = ranks_of(run.pids["learner-0"])
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        wait_for(lambda: lives(run) == 2)
        again = ranks_of(run.pids["learner-0"])
        assert len(again) == 2
        run.end()
    assert not {*ranks} & {*again}
    assert run.report["tokens_lost"]["unaccounted"] == 0
    learners = {one["id"]: one for one in run.report["learners"]}
    assert [learners[f"learner-{n}"]["incarnations"] for n in (0, 1)] == [2, 1]
    assert (run.out / "logs/learner-0.log").read_text().count('"event": "learner_left"') == 1
    assert learners["learner-1"]["left"]
    assert [learners[f"learner-{n}"]["ranks"] for n in (0, 1)] == [2, 1]
    assert len(merged_of(run, "learner-0")) == 2
    assert len(merged_of(run, "learner-1")) == 1
    assert not any(map(is_running, (*ranks, *again)))
    run.left_nothing_running()


def test_ctrl_c_ends_ranks_in_order_and_a_killed_learner_takes_its_ranks_along(tmp_path: Path) -> None:
    """The process that has started the ranks is killed: they end with it. Ctrl-C then ends the run with its report, and
    the ranks of the other learner have left in order."""
    devices = ("--learners", 2, "--devices", "cpu+cpu", "--model", "nano")
    with started(tmp_path / "out", *devices, "--tokens", "50M") as run:
        train(run, "learner-0", "learner-1")
        ranks = {name: ranks_of(run.pids[name]) for name in ("learner-0", "learner-1")}
        assert list(map(len, ranks.values())) == [2, 2]
        os.kill(run.pids["learner-1"], signal.SIGKILL)
        wait_for(lambda: not any(map(is_running, ranks["learner-1"])))
        assert all(map(is_running, ranks["learner-0"]))
        run.process.send_signal(signal.SIGINT)
        run.end()
    assert run.report["stopped"] is True
    assert run.report["tokens_lost"]["unaccounted"] == 0
    assert {one["id"]: one["left"] for one in run.report["learners"]}["learner-0"]
    assert not any(map(is_running, ranks["learner-0"]))
    run.left_nothing_running()
