"""Promises of the built-in trainer as several ranks: same steps as one process, and what it refuses."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from diloco.pipeline.bus.embedded import free_port
from diloco.pipeline.errors import RankGone, SpecMismatch, UsageError
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.settings import LearnerProcess, load
from diloco.workers.checks.sets import check_set
from diloco.workers.trainer import agent, trainer
from diloco.workers.trainer.agent import may_start_again
from diloco.workers.trainer.models.gpt import build
from diloco.workers.trainer.together import Ranks, blocks_of, mark, rank_device, ranks_here
from tests import HANGING_S, samples
from tests.parties import environment

PROGRAM = Path(__file__).with_name("together_rank.py")
WAYS = [f"{s}-{p}-{a}" for s, p, a in itertools.product(("ddp", "fsdp"), ("fp32", "bf16"), (False, True))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of what one process and two ranks have made."""
    folders, started = {}, []
    for count in (1, 2):
        folders[count] = tmp_path_factory.mktemp(f"of-{count}")
        port = str(free_port())
        for rank in range(count):
            group = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
            group |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, str(PROGRAM), str(folders[count])]
            started.append(subprocess.Popen(command, env=environment(OMP_NUM_THREADS="1", **group)))
    try:
        assert [one.wait(HANGING_S) for one in started] == [0] * 3
    finally:
        for one in started:
            one.kill()
            one.wait()
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_make_the_steps_of_one_process(trained: dict[int, Path], way: str) -> None:
    """In DDP and FSDP, fp32 and bf16, with activations kept or computed again: equal but for rounding, far nearer to
    the one process than to where both began."""
    one, two = (torch.load(trained[count] / f"{way}.pt") for count in (1, 2))
    began = dict(build("nano", 0).named_parameters())
    assert one.keys() == two.keys() == began.keys()
    for name, tensor in one.items():
        moved = (tensor - began[name].detach()).norm()
        assert moved > 0
        assert (tensor - two[name]).norm() < (1e-4 if "fp32" in way else 0.05) * moved, name


@pytest.mark.slow
def test_in_bf16_a_parameter_that_one_rank_has_used_has_its_share_of_the_gradient_on_all(
    trained: dict[int, Path],
) -> None:
    """Where a rank has no gradient it counts as zero, and no other parameter's takes its place."""
    for rank in range(2):
        *grads, frozen = torch.load(trained[2] / f"used-{rank}.pt")
        assert [grad.tolist() for grad in grads] == [[5.0, 5.0], [10.0, 10.0], [0.0, 0.0]]
        assert frozen is None


def test_the_launchers_variables_say_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without all of them, and where the launcher has started one process, it is a learner by itself."""
    names = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in names.items():
        assert ranks_here() == Ranks()
        monkeypatch.setenv(name, value)
    assert ranks_here() == Ranks(5, 8, 1, 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ranks_here() == Ranks()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"batch": 6},
            "batch=6: a learner with 4 ranks divides each batch among them; use a number of ranks that divides it",
        ),
        ({"batch": 8, "sharding": "fsdp", "compile": True}, "--compile with DILOCO_SHARDING=fsdp"),
    ],
)
def test_what_ranks_cannot_train_with_is_refused_by_name(given: dict[str, object], said: str) -> None:
    settings = load(LearnerProcess, given)
    with pytest.raises(UsageError, match=said):
        check_set(4, settings.batch, settings.sharding, settings.compile)


def test_each_rank_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    second = Ranks(1, 2, 1, 2)
    for asked, number in (("auto", 1), ("cuda", 1), ("cuda:2+cuda:3", 3)):
        assert rank_device(second, asked) == torch.device("cuda", number) == taken[-1]
    assert rank_device(second, "cpu") == rank_device(second, "cpu+cpu") == torch.device("cpu")
    too_many = "has 3 devices, but this learner has 2 ranks on this machine"
    for asked, said in (("cuda:1", "is one device"), ("cuda:0+cuda:1+cuda:2", too_many)):
        with pytest.raises(UsageError, match=said):
            rank_device(second, asked)
    with pytest.raises(UsageError, match="cuda:4"):
        rank_device(Ranks(4, 5, 4, 5), "auto")


def test_only_ranks_that_were_killed_or_miss_another_are_started_again() -> None:
    """What was refused would be refused again, also where the launcher has ended the other ranks for it."""
    refused = {0: 2, 1: 2}, {0: -15, 1: 2}, {0: -9, 1: 2}, {0: 75, 1: 2}, {1: 1}, {0: 1, 1: -15}
    assert not any(map(may_start_again, refused))
    assert all(map(may_start_again, ({1: -9}, {0: 1, 1: -9}, {0: 75}, {0: 75, 1: -15})))


class Launched:
    """In place of torch's launcher: each life of the ranks ends so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: Callable[[], object]) -> None:
        self.lives, self._end = 0, end
        monkeypatch.setattr(agent, "elastic_launch", lambda config, entrypoint: self._live)
        monkeypatch.setattr(os, "environ", dict(os.environ))
        monkeypatch.setattr("time.sleep", lambda seconds: None)

    def _live(self, *command: str) -> None:
        self.lives += 1
        self._end()


def test_ranks_that_fail_again_and_again_at_once_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few lives; lives that had lasted are started again more often."""

    def crash() -> None:
        clock[0] += lasts
        raise ChildFailedError("learner", {0: ProcessFailure(0, 1, AGAIN_STATUS, "nowhere")})

    clock, lasts = [0.0], 5.0
    launched = Launched(monkeypatch, crash)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    assert agent.run_ranks(2, "l", 1.0) == 1  # not 75: whoever starts it would have it fail for ever
    assert launched.lives == agent.MAX_QUICK
    lasts = 100.0
    assert agent.run_ranks(2, "l", 1.0) == 1
    assert launched.lives == agent.MAX_QUICK + agent.MAX_RESTARTS + 1


@pytest.mark.parametrize(("left", "lost"), [((), "rank 0, rank 1"), ((0,), "rank 1"), ((0, 1), "")])
def test_after_a_signal_a_learner_is_one_to_start_again_and_its_log_says_who_was_lost(
    left: tuple[int, ...], lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names the ranks that trained and were killed or left unflushed; none, if none had begun."""

    def train() -> None:
        for rank in range(2):
            mark(Ranks(rank, 2, rank, 2), at_work=True)
        for rank in left:
            mark(Ranks(rank, 2, rank, 2), at_work=False)
        signalled()

    def signalled() -> None:
        raise SignalException("asked to stop", signal.SIGTERM)

    for lives, names in ((train, lost), (signalled, "")):
        Launched(monkeypatch, lives)
        with capture_logs() as logs:
            assert agent.run_ranks(2, "l", 1.0) == AGAIN_STATUS
        assert [(one["log_level"], ", ".join(one["not_in_order"])) for one in logs] == [
            ("error" if names else "info", names)
        ]


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("CUDA error"), 75), (OSError("gone"), 75), (RankGone("1"), 75), (UsageError("no"), None)],
)
def test_a_rank_that_crashes_is_one_to_start_again_and_a_refused_one_is_not(
    error: Exception, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*given: object) -> int:
        raise error

    monkeypatch.setattr(trainer, "process_group", lambda ranks, device: nullcontext())
    monkeypatch.setattr(trainer, "agree_on_spec", lambda ranks, read: None)
    monkeypatch.setattr(trainer, "train_once", crash)
    given = load(LearnerProcess, {}), lambda: None, "unix:///nowhere", torch.device("cpu"), Ranks(0, 2, 0, 2)
    if status is None:
        with pytest.raises(type(error)):
            trainer.train_together(*given)
    else:
        assert trainer.train_together(*given) == status


def test_ranks_whose_spec_was_replaced_as_they_joined_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a checkpoint that a syncer goes on from; with the spec as it was they are refused."""
    before, now = samples.spec(), samples.spec(tokens=samples.spec().sync.tokens + 1)

    def join(*given: object) -> int:
        raise SpecMismatch("this learner and the run disagree")

    monkeypatch.setattr(trainer, "process_group", lambda ranks, device: nullcontext())
    monkeypatch.setattr(trainer, "agree_on_spec", lambda ranks, read: before)
    monkeypatch.setattr(trainer, "train_once", join)
    rest = "unix:///nowhere", torch.device("cpu"), Ranks(0, 2, 0, 2)
    assert trainer.train_together(load(LearnerProcess, {}), lambda: now, *rest) == AGAIN_STATUS
    with pytest.raises(SpecMismatch):
        trainer.train_together(load(LearnerProcess, {}), lambda: before, *rest)


def test_blocks_are_the_layers_and_not_what_lies_within_them() -> None:
    model = build("nano", 0)
    assert blocks_of(model) == list(model.blocks)
    layer = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(1, 1)])})
    assert blocks_of(torch.nn.ModuleDict({"inner": torch.nn.ModuleDict({"h": torch.nn.ModuleList([layer])})})) == [
        layer
    ]
