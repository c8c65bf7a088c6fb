"""Promises about the built-in trainer, with a learner that has no network behind it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from diloco.pipeline.errors import BusUnavailable, SpecMismatch, UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.shards import ClaimedShard, Shard
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.settings import LearnerProcess, SyncSettings, load
from diloco.workers.exchange.redis_access import FirstSpecSettings
from diloco.workers.exchange.shared import Shared
from diloco.workers.learner import Learner
from diloco.workers.moments.state_folder import StateFolder
from diloco.workers.parameters import tensor_table
from diloco.workers.spec_proposal import proposal
from diloco.workers.trainer import trainer
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.models.gpt import build
from diloco.workers.trainer.recipe import (
    StopFlag,
    add_gradients,
    choose_device,
    forward_of,
    held_out_loss,
    loss_of,
    make_optimizers,
    trainer_spec,
    update,
)
from tests import slow_beyond


class FakeLearner:
    """Counts what the trainer tells it; the run ends after `budget` tokens."""

    budget: ClassVar[int] = 10_000
    spec: ClassVar[Spec | None] = None
    made: ClassVar[list["FakeLearner"]] = []
    recovered: ClassVar[str] = "start"
    earlier_steps: ClassVar[int] = 0

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], **told: Any) -> None:
        self.model, self.told = model, told
        (self.optimizer,) = optimizers
        self.id = "fake"
        self.tokens: list[int] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.read: list[tuple[int, int]] = []
        self.left = False
        self.left_in_order = True
        FakeLearner.made.append(self)

    @staticmethod
    def read_spec(redis_url: str, run: str) -> Spec | None:
        return FakeLearner.spec

    def __enter__(self) -> "FakeLearner":
        return self

    def __exit__(self, *error: object) -> None:
        self.left = True

    @property
    def finished(self) -> bool:
        return sum(self.tokens) >= self.budget

    over = finished
    exit_status = 0

    @property
    def progress(self) -> float:
        return min(1.0, sum(self.tokens) / self.budget)

    def blocks(self, total: int, per_shard: int) -> Iterator[tuple[int, int]]:
        self.per_shard = per_shard
        for i in range(10**9):
            self.read.append(divmod(i, total))
            yield divmod(i, total)

    def step(self, tokens: int, loss: torch.Tensor) -> None:
        self.tokens.append(tokens)
        self.losses.append(loss.item())
        self.rates.append(self.optimizer.param_groups[0]["lr"])


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeLearner]]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    threads = torch.get_num_threads()
    monkeypatch.setattr(trainer, "Learner", FakeLearner)
    monkeypatch.setattr(FakeLearner, "spec", None)
    monkeypatch.setattr(FakeLearner, "made", [])
    monkeypatch.setattr(FakeLearner, "recovered", "start")
    yield FakeLearner
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def settings(book: Path, **told: Any) -> LearnerProcess:
    small = {"redis_url": "unix:///nowhere", "data": str(book), "seq_len": 32, "batch": 4, "threads": 1}
    return load(LearnerProcess, small | told)


def run_spec(asked: LearnerProcess) -> Spec:
    """The spec of a run that was started with these settings."""
    agreed = trainer_spec(asked, open_text(asked.data))
    return Spec(sync=asked.sync_spec(), tensors=tensor_table(build(asked.model, 0), asked), trainer=agreed)


def test_it_trains_until_the_run_is_finished(book: Path) -> None:
    """The loss falls, every step's tokens are told, each block is read once, and it leaves with status 0."""
    assert trainer.train(settings(book, accumulate=2)) == 0
    (learner,) = FakeLearner.made
    assert learner.left
    assert set(learner.tokens) == {2 * 4 * 32}
    assert len(learner.read) == len(learner.tokens) * 8
    assert learner.per_shard == 8 * trainer.STEPS_PER_SHARD
    assert learner.losses[0] > 5
    assert np.mean(learner.losses[-5:]) < 4


def test_the_learning_rate_follows_the_runs_progress(book: Path) -> None:
    """Up, then down to its floor, whatever number of steps this learner makes."""
    trainer.train(settings(book, lr=0.01, min_lr_ratio=0.1))
    rates = FakeLearner.made[0].rates
    peak = rates.index(max(rates))
    assert rates[0] < 0.001
    assert 0 < peak < len(rates) / 2
    assert rates[-1] == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize(
    ("recovered", "earlier", "share"),
    slow_beyond(
        3,
        [
            *(("fresh", 0, 1 / 10), ("peer", 0, 1.0), ("checkpoint", 1, 2 / 10)),
            *(("start", 0, 1 / 20), ("checkpoint", 20, 1.0)),
        ],
    ),
)
def test_only_fresh_moments_get_a_ramp(
    book: Path, monkeypatch: pytest.MonkeyPatch, recovered: str, earlier: int, share: float
) -> None:
    """A fixed one at the run's start, one of the asked length after joining, none with recovered moments; and where
    fresh ones were saved a step after joining, the second of ten steps of the ramp comes next."""
    monkeypatch.setattr(FakeLearner, "recovered", recovered)
    monkeypatch.setattr(FakeLearner, "earlier_steps", earlier)
    trainer.train(settings(book, lr=0.01, warmup=0.0, ramp_steps=10))
    rates = FakeLearner.made[0].rates
    assert rates[0] == pytest.approx(0.01 * share, rel=0.01)
    assert rates[20] == pytest.approx(0.01, rel=0.2)


def test_the_learner_is_told_what_to_recover_from(book: Path, tmp_path: Path) -> None:
    trainer.train(settings(book, recover="peer", state_dir=tmp_path, state_every="5s", log_losses=True))
    told = FakeLearner.made[0].told
    asked = {"recover": "peer", "state_dir": tmp_path, "state_every_s": 5.0, "log_losses": True}
    assert {name: told[name] for name in asked} == asked


def test_the_first_learner_says_what_the_run_is(book: Path) -> None:
    """The trainer's settings and the text's fingerprint go into the spec."""
    asked = settings(book, seed=3)
    trainer.train(asked)
    told = FakeLearner.made[0].told
    assert told["trainer"] == asked.trainer_spec() | {"data_fingerprint": open_text(str(book)).fingerprint}
    assert told["redis_url"] == "unix:///nowhere"


def test_one_that_joins_follows_the_run(book: Path) -> None:
    """What it was not told it takes from the spec, so that both propose the same."""
    FakeLearner.spec = run_spec(settings(book, batch=2, lr=0.005))
    trainer.train(load(LearnerProcess, {"redis_url": "unix:///nowhere", "threads": 1}))
    assert FakeLearner.made[0].told["trainer"] == FakeLearner.spec.trainer
    assert FakeLearner.made[0].tokens[0] == 2 * 32


def test_one_that_disagrees_is_refused(book: Path) -> None:
    FakeLearner.spec = run_spec(settings(book))
    with pytest.raises(SpecMismatch, match=r"batch: here 8, the run has 4"):
        trainer.train(settings(book, batch=8))
    assert not FakeLearner.made


@pytest.mark.parametrize("before", [None, {"batch": 4, "tokens": 2_500_000}])
def test_a_spec_that_is_another_by_the_time_it_joins_is_followed(
    before: dict[str, int] | None, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another learner was quicker to propose, or a syncer's checkpoint takes the place of what one had proposed."""
    theirs = run_spec(settings(book, batch=2))
    FakeLearner.spec = before and run_spec(settings(book, **before))

    def join(learner: FakeLearner) -> FakeLearner:
        if FakeLearner.spec != theirs:
            FakeLearner.spec = theirs
            raise SpecMismatch("this learner and the run disagree")
        return learner

    monkeypatch.setattr(FakeLearner, "__enter__", join)
    small = {"redis_url": "unix:///nowhere", "data": str(book), "seq_len": 32, "threads": 1}
    assert trainer.train(load(LearnerProcess, small)) == 0
    assert FakeLearner.made[-1].told["trainer"] == theirs.trainer


def test_another_spec_while_it_trains_is_not_followed(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another run of the name."""
    FakeLearner.spec = run_spec(settings(book))

    def step(learner: FakeLearner, tokens: int, loss: torch.Tensor) -> None:
        FakeLearner.spec = run_spec(settings(book, batch=2))
        raise SpecMismatch("this learner and the run disagree")

    monkeypatch.setattr(FakeLearner, "step", step)
    with pytest.raises(SpecMismatch):
        trainer.train(load(LearnerProcess, {"redis_url": "unix:///nowhere", "threads": 1}))
    assert len(FakeLearner.made) == 1


def test_the_text_may_lie_elsewhere_but_must_be_the_same(book: Path, tmp_path: Path) -> None:
    FakeLearner.spec = run_spec(settings(book))
    copy, other = tmp_path / "copy.txt", tmp_path / "other.txt"
    copy.write_bytes(book.read_bytes())
    other.write_bytes(book.read_bytes().replace(b"fox", b"cat"))
    assert trainer.train(settings(copy)) == 0
    assert FakeLearner.made[0].told["trainer"] == FakeLearner.spec.trainer
    with pytest.raises(SpecMismatch, match="a different text"):
        trainer.train(settings(other))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_between_two_steps(number: int, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM, or SIGHUP of a closed terminal: the inner step is finished and told, then it leaves, status 75."""
    tell = FakeLearner.step

    def step(self: FakeLearner, tokens: int, loss: torch.Tensor) -> None:
        tell(self, tokens, loss)
        if len(self.tokens) == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(FakeLearner, "step", step)
    assert trainer.train(settings(book)) == AGAIN_STATUS
    assert len(FakeLearner.made[0].tokens) == 3
    assert FakeLearner.made[0].left


def test_a_signal_ends_it_in_a_pause(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep goes on after the handler of a signal."""
    tell = FakeLearner.step

    def step(self: FakeLearner, tokens: int, loss: torch.Tensor) -> None:
        tell(self, tokens, loss)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(FakeLearner, "step", step)
    began_s = time.monotonic()
    assert trainer.train(settings(book, pace="20s")) == AGAIN_STATUS
    assert len(FakeLearner.made[0].tokens) == 1
    assert time.monotonic() < began_s + 15


def test_a_run_that_ends_in_a_pause_ends_it(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: FakeLearner, tokens: int, loss: torch.Tensor) -> None:
        threading.Timer(0.5, self.tokens.append, (self.budget,)).start()

    monkeypatch.setattr(FakeLearner, "step", step)
    began_s = time.monotonic()
    assert trainer.train(settings(book, pace="20s")) == 0
    assert time.monotonic() < began_s + 15


def test_a_signal_before_the_first_step_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits to join has nothing to save: status 75. While training a signal only sets the flag."""
    exits: list[int] = []
    monkeypatch.setattr("diloco.pipeline.process.signals.os._exit", exits.append)
    StopFlag()
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == AGAIN_STATUS
    stop = StopFlag()
    stop.training = True
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.asked
    assert not exits
    os.kill(os.getpid(), signal.SIGINT)
    assert exits == [1]


def test_a_signal_ends_also_who_waits_for_its_first_shard(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag would be looked at after the first step only, and that may never come."""
    flags: list[bool] = []

    class Flag:
        asked = training = False

    def blocks(self: FakeLearner, total: int, per_shard: int) -> Iterator[tuple[int, int]]:
        flags.append(flag.training)
        return production(self, total, per_shard)

    flag, production = Flag(), FakeLearner.blocks
    monkeypatch.setattr(trainer, "StopFlag", lambda: flag)
    monkeypatch.setattr(FakeLearner, "blocks", blocks)
    assert trainer.train(settings(book)) == 0
    assert flags == [False]
    assert flag.training


def test_the_first_shard_is_waited_for_before_any_block_is_asked_for() -> None:
    """So that what comes after the call is training, and what comes before it is joining."""
    shared, checked = Shared(), []
    shard = ClaimedShard(entry_id="1-0", shard=Shard(epoch=0, index=0, start=0, stop=8), position=0)

    def look() -> None:
        checked.append(shared.shards_wanted)
        shared.shards.put(shard)

    agreed: Future[None] = Future()
    agreed.set_result(None)
    member = SimpleNamespace(outages=SimpleNamespace(retry=lambda what, order: order))
    joined = SimpleNamespace(
        shared=shared,
        exchange=SimpleNamespace(claims=SimpleNamespace(want=None, finish=None, agree=None), member=member),
        thread=SimpleNamespace(call=lambda what, *args: checked.append(what), ask=lambda order: agreed),
        training=SimpleNamespace(rounds=SimpleNamespace(steps=1), incarnation="00"),
        together=False,
    )
    stopping = SimpleNamespace(leave_if_asked=look)
    learner: Any = SimpleNamespace(joined=joined, _stopping=stopping)
    order = Learner.blocks(learner, 16, 8)
    assert checked == [None, (16, 8)]
    assert shared.shards.empty()
    assert shared.shard_handed_out is None
    assert next(order) == (0, 0)


def test_it_waits_for_a_redis_that_is_not_there_yet(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers start in any order: an unreachable bus is tried again."""
    answers = iter([BusUnavailable("no"), BusUnavailable("no"), None])

    def read_spec(redis_url: str, run: str) -> Spec | None:
        answer = next(answers)
        if answer is not None:
            raise answer
        return None

    monkeypatch.setattr(FakeLearner, "read_spec", staticmethod(read_spec))
    assert trainer.train(settings(book)) == 0


def test_pace_pads_each_step(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sleep and the step together have the length that was asked for."""
    now_s, steps_s = [0.0], list[float]()
    tell = FakeLearner.step

    def step(self: FakeLearner, tokens: int, loss: torch.Tensor) -> None:
        steps_s.append(now_s[0])
        now_s[0] += 4.0
        tell(self, tokens, loss)

    def sleep(for_s: float) -> None:
        now_s[0] += for_s

    monkeypatch.setattr(FakeLearner, "step", step)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    trainer.train(settings(book, pace="10s"))
    assert len(steps_s) > 10
    assert steps_s == pytest.approx([10.0 * n for n in range(len(steps_s))])


def test_no_redis_is_a_usage_error(book: Path) -> None:
    with pytest.raises(UsageError, match="DILOCO_REDIS_URL"):
        trainer.train(settings(book).model_copy(update={"redis_url": None}))


@pytest.mark.parametrize("name", ["cuda:99", "cuda:-1", "meta", "xpu", "hpu:0", "nonsense", ""])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    """Also one that only torch knows, and one that nobody does."""
    with pytest.raises(UsageError, match=f"device='{name}' is not available .*; use 'auto' for whatever is available"):
        choose_device(name)


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    """Two micro-batches give the gradient and loss of one batch twice the size."""
    batch = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(0))
    whole, parts = build("tiny", 0), build("tiny", 0)
    one = add_gradients(whole, [batch], 1)
    two = add_gradients(parts, torch.split(batch, 2), 2)
    torch.testing.assert_close(one, two)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)


def test_decay_is_on_matrices_only() -> None:
    (optimizer,) = make_optimizers(nn.Linear(3, 3).parameters(), 1.0, 0.5)
    decay = {p.dim(): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay == {2: 0.5, 1: 0.0}


@pytest.mark.parametrize(
    ("gradient", "clip", "change"), [(1e6, 1.0, [[0.3, 0.4]]), (1e30, float("inf"), [[15e29, 2e30]])]
)
def test_an_update_clips_and_clears(gradient: float, clip: float, change: list[list[float]]) -> None:
    """A huge gradient is scaled to the clipping norm before the step, unless that is infinite, and gone after it."""
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = gradient * torch.tensor([[3.0, 4.0]])
    update(layer, [torch.optim.SGD(layer.parameters(), lr=9.0)], lr=0.5, clip=clip)
    torch.testing.assert_close(before - layer.weight.detach(), torch.tensor(change), atol=1e-5, rtol=1e-4)
    assert layer.weight.grad is None


def test_held_out_loss_is_the_mean_over_all_tokens() -> None:
    """Cut into passes or not, it is one number, and it leaves no gradient."""
    model = build("tiny", 0)
    validation = np.random.default_rng(0).integers(0, 256, (70, 65)).astype(np.uint8)
    expected = loss_of(model, torch.from_numpy(validation).long()).item()
    assert held_out_loss(model, validation, torch.device("cpu")) == pytest.approx(expected, rel=1e-5)
    assert all(tensor.grad is None for tensor in model.parameters())


def test_a_compiled_model_trains_the_same_parameters() -> None:
    """What is synchronised is the model that was given; the gradients are its own, and the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
    batch = [torch.randint(0, 256, (2, 9))]
    losses, gradients = [], []
    for compiled in (False, True):
        forward = forward_of(model, torch.device("cpu"), compiled, backend="aot_eager")
        assert (forward is model) is not compiled
        losses.append(add_gradients(forward, batch, 1))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad(set_to_none=True)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_machine_that_cannot_compile_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is made, and before anybody is joined."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nmore")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(UsageError, match=r"g\+\+.*No working C\+\+ compiler found$"):
        forward_of(nn.Linear(1, 1), torch.device("cpu"), compiled=True)


def test_a_learner_says_how_many_threads_it_has_on_how_many_cores() -> None:
    """So that the status can tell who takes more than there is. Read in the exchange's thread, which trains nothing."""
    had = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        learner = Learner(nn.Linear(2, 2), redis_url="unix:///nowhere", sync=SyncSettings(fragments=1))
        spec = proposal(learner._proposed(), learner._given, None, FirstSpecSettings())
        training = learner._training(spec, layout_of(spec.tensors), StateFolder)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(training.report, False).result().threads == (3, usable_cores())
    finally:
        torch.set_num_threads(had)
