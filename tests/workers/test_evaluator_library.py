"""Promises about `Evaluator`, for any model and any run: on a real Redis, with a syncer and learners."""

import asyncio
import itertools
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from diloco import Evaluator, Learner
from diloco.pipeline.bus.embedded import EmbeddedRedis, free_port
from diloco.pipeline.errors import NotPermitted, RunReplaced, SpecMismatch, UsageError
from diloco.pipeline.messages.run import Evaluation, Phase
from diloco.pipeline.retry import Backoff
from diloco.pipeline.settings import SyncSettings
from diloco.workers.exchange import evaluating
from diloco.workers.times import LearnerTimes
from tests import HANGING_S
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import on_bus, until

pytestmark = pytest.mark.redis
SYNC = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1, tokens=400, global_codec="fp32")


class Net(nn.Module):
    """With dropout, tied weights and a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.inner.weight
        self.drop, self.frozen = nn.Dropout(0.5), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.drop(self.again(self.inner(x)))) + torch.randn(()) * 0


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(model: nn.Module) -> torch.Tensor:
    """Draws random numbers, as a DataLoader does."""
    torch.randn(3)
    random.random()
    np.random.rand()
    return model(torch.ones(8, 4)).square().mean()


def learner_of(url: str, run: str, model: nn.Module) -> Learner:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return Learner(model, optimizer, run=run, redis_url=url, sync=SYNC, learner_id="l0", leave_s=10.0)


def train(learner: Learner, each: Callable[[], object] = lambda: None) -> None:
    """To the end of the run."""
    with learner:
        learner.attach(tokens=10)
        while not learner.finished:
            learner.model(torch.full((2, 4), 2.0)).square().sum().backward()
            assert isinstance(learner.optimizer, torch.optim.Optimizer)
            learner.optimizer.step()
            learner.optimizer.zero_grad()
            each()
            time.sleep(0.01)


def evaluations(url: str, run: str) -> list[Evaluation]:
    return [one for _, one in on_bus(url, run, lambda bus: bus.read_evaluations())]


@contextmanager
def following(evaluator: Evaluator) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=evaluator.follow)
    thread.start()
    try:
        yield thread
    finally:
        evaluator.stop()
        thread.join(HANGING_S)
        assert not thread.is_alive()


@pytest.fixture
def run() -> str:
    return f"run-{secrets.token_hex(4)}"


def test_it_follows_a_run_from_before_its_start_to_its_end(redis_server: str, run: str) -> None:
    """It waits for the run, measures as the heads move, and ends with the last model, which is measured as final: the
    same number as of the model that the learner loads in the end."""
    steps = itertools.count(1)

    def each() -> None:
        """Training goes on once the first steps were measured, then the next."""
        if (step := next(steps)) in (10, 20):
            until(lambda: len(evaluations(redis_server, run)) >= step // 10)

    with following(Evaluator(made(), loss_of, run=run, redis_url=redis_server, every_s=0.2)) as thread:
        with a_syncer(redis_server, run):
            learner = learner_of(redis_server, run, made())
            train(learner, each)
            learner.load_globals()
        thread.join(HANGING_S)
        assert not thread.is_alive()
    found = evaluations(redis_server, run)
    assert [one.final for one in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 2
    assert found[-1].loss == pytest.approx(loss_of(learner.model.eval()).item(), rel=1e-5)
    assert found[-1].loss < found[0].loss
    assert [one.tokens for one in found] == sorted(one.tokens for one in found)


def test_one_that_is_started_after_the_end_measures_the_finished_run(redis_server: str, run: str) -> None:
    with a_syncer(redis_server, run):
        learner = learner_of(redis_server, run, made())
        train(learner)
        learner.load_globals()  # waits for the run's end
    assert on_bus(redis_server, run, lambda bus: bus.read_state()).phase is Phase.FINISHED
    Evaluator(made(), loss_of, run=run, redis_url=redis_server).follow()
    (only,) = evaluations(redis_server, run)
    assert only.final


def test_measuring_in_a_training_loop_leaves_training_as_it_is(redis_server: str, run: str) -> None:
    """Bit for bit, dropout included: its model, random numbers and mode of training are untouched. Of the one that
    trains, the evaluator has a copy. What has not moved is not measured again."""

    def trained(measures: bool, name: str) -> tuple[torch.Tensor, list[float | None]]:
        model, found = made(), list[float | None]()
        random.seed(0)
        np.random.seed(0)
        with a_syncer(redis_server, name), learner_of(redis_server, name, model) as learner:
            evaluator = Evaluator(model, loss_of, run=name, redis_url=redis_server)
            until(lambda: on_bus(redis_server, name, lambda bus: bus.read_state()))
            optimizer: Any = learner.optimizer
            for _ in range(8):  # not told to the learner: nothing is published, so nothing is adopted
                optimizer.zero_grad()
                model(torch.full((2, 4), 2.0)).square().sum().backward()
                optimizer.step()
                if measures:
                    found.append(evaluator.evaluate())
            assert model.training
            drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
        return torch.cat((model.inner.weight.detach().flatten(), drawn)), found

    without, _ = trained(False, f"{run}-a")
    beside, found = trained(True, f"{run}-b")
    assert torch.equal(without, beside)
    assert found == [found[0]] * 8
    assert len(evaluations(redis_server, f"{run}-b")) == 1


def test_in_a_loop_it_follows_what_is_merged(redis_server: str, run: str) -> None:
    """Each time the run's newest model, also where the thread has an event loop of its own, as a notebook's."""
    found: list[float | None] = []
    with a_syncer(redis_server, run):
        model = made()
        evaluator = Evaluator(model, loss_of, run=run, redis_url=redis_server)
        assert evaluator.evaluate() is None

        async def measured() -> float | None:
            return evaluator.evaluate()

        def look() -> None:
            until(lambda: on_bus(redis_server, run, lambda bus: bus.read_state()))  # some moments after joining
            found.append(asyncio.run(measured()))

        train(learner_of(redis_server, run, model), look)
    kept = [one.loss for one in evaluations(redis_server, run)]
    measured_once = [loss for loss in found if loss is not None]  # the run's state may come after its parameters
    assert kept == [loss for i, loss in enumerate(measured_once) if i == 0 or loss != measured_once[i - 1]]
    assert len(kept) > 3
    assert kept[-1] < kept[0]


def test_a_user_that_may_not_measure_ends_no_training(
    redis_server: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told which user it needs."""

    async def refused(bus: Any) -> None:
        raise NotPermitted("no rights for key rest", "use another user", "NOPERM")

    monkeypatch.setattr("diloco.workers.evaluator.read_run", refused)
    with capture_logs() as logs:
        assert Evaluator(made(), loss_of, run=run, redis_url=redis_server).evaluate() is None
    (told,) = logs
    assert (told["event"], told["error"]) == ("evaluation_refused", "no rights for key rest (NOPERM)")
    assert "`evaluator`" in told["detail"]


def test_it_outlives_redis(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is none `evaluate` says so and returns; `follow` waits, and tells a new run from the one before."""
    monkeypatch.setattr(evaluating, "TIMES", LearnerTimes(reach_retry=Backoff(0.05, 0.1)))
    port = free_port()
    url = f"redis://127.0.0.1:{port}"
    evaluator = Evaluator(made(), loss_of, run=run, redis_url=url, every_s=0.1)
    assert evaluator.evaluate() is None
    follow, ended = evaluator.follow, list[str]()

    def until_replaced() -> None:
        with pytest.raises(RunReplaced, match="This evaluator has measured") as told:
            follow()
        ended.append(str(told.value))

    monkeypatch.setattr(evaluator, "follow", until_replaced)
    with following(evaluator) as thread:
        with EmbeddedRedis(port=port), a_syncer(url, run), learner_of(url, run, made()) as learner:
            learner.step(1)
            until(lambda: evaluations(url, run))
        time.sleep(1.0)  # the server is gone, with all that it had
        assert thread.is_alive()
        with EmbeddedRedis(port=port), a_syncer(url, run):
            train(learner_of(url, run, made()))
            thread.join(HANGING_S)
            assert not thread.is_alive()
            assert len(ended) == 1


def test_it_ends_when_it_is_told_to(redis_server: str, run: str) -> None:
    """Also before it has begun."""
    evaluator = Evaluator(made(), loss_of, run=run, redis_url=redis_server)
    with following(evaluator) as thread:
        time.sleep(0.3)
        assert thread.is_alive()
    evaluator.follow()


NO_LOSSES: list[tuple[Any, str]] = [
    *((None, "a NoneType"), (torch.ones(2), r"a tensor of shape \(2,\)"), (torch.tensor(1j), "a complex number")),
    *((10**400, "a number too large for a float"), (10**5000, "a number too large for a float"), (1j, "a complex")),
    *((np.complex128(1j), "a complex128"), ("2.5", "a str"), ([2.5], "a list"), (np.ones(2), "a ndarray")),
    (torch.ones(1, device="meta"), "a tensor on the meta device"),
]


def test_a_loss_that_has_diverged_is_kept_as_it_is(redis_server: str, run: str) -> None:
    """NaN and infinities, as floats and as tensors."""
    losses = [math.nan, math.inf, torch.tensor(-math.inf), np.float32("nan")]
    with a_syncer(redis_server, run), learner_of(redis_server, run, made()) as learner:
        learner.step(1)
        until(lambda: Evaluator(made(), loss_of, run=run, redis_url=redis_server).evaluate() is not None)
        for loss in losses:
            found = Evaluator(made(), lambda model, loss=loss: loss, run=run, redis_url=redis_server).evaluate()
            np.testing.assert_equal(found, float(loss))
    np.testing.assert_equal([one.loss for one in evaluations(redis_server, run)][1:], [float(loss) for loss in losses])


def test_another_model_than_the_runs_is_refused(redis_server: str, run: str) -> None:
    """By the names of the tensors that differ; a loss that is no number, too."""
    other, wide = nn.Linear(4, 4), made()
    wide.inner = nn.Linear(5, 4)
    with a_syncer(redis_server, run), learner_of(redis_server, run, made()) as learner:
        learner.step(1)
        for model, told in (
            (other, r"tensor inner.weight: here absent"),
            (wide, r"here \[4, 5\], the run has \[4, 4\]"),
        ):
            with pytest.raises(SpecMismatch, match=told):
                Evaluator(model, loss_of, run=run, redis_url=redis_server).evaluate()
        for loss, told in NO_LOSSES:
            with pytest.raises(UsageError, match=f"the evaluator's loss is .*{told}: return one number"):
                Evaluator(made(), lambda model, loss=loss: loss, run=run, redis_url=redis_server).follow()
    assert evaluations(redis_server, run) == []


def test_a_compiled_model_is_measured_by_the_plain_models_names(redis_server: str, run: str) -> None:
    """Its parameters and the statistics of its BatchNorm, whoever of the two is compiled: learner or evaluator."""

    def normed(compiled: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        return torch.compile(model, backend="eager") if compiled else model  # type: ignore[return-value]

    with a_syncer(redis_server, run):
        learner = learner_of(redis_server, run, normed(compiled=True))
        evaluators = [Evaluator(normed(way), loss_of, run=run, redis_url=redis_server) for way in (True, False)]
        train(learner)
        learner.load_globals()
    expected = loss_of(learner.model.eval()).item()
    assert [one.evaluate() for one in evaluators] == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("model", None), ("loss_fn", 3), ("device", "bogus"), ("device", 1.5)),
        *(("every_s", bad) for bad in (math.nan, math.inf, -5, "5s", True)),
    ],
)
def test_a_wrong_argument_is_refused_when_it_is_made(argument: str, value: Any) -> None:
    told = {"model": made(), "loss_fn": loss_of, "redis_url": "redis://nowhere"} | {argument: value}
    with pytest.raises(UsageError, match=f"Evaluator: {argument}"):
        Evaluator(**told)


def test_a_model_that_cannot_be_copied_is_said() -> None:
    model = made()
    model.kept = model(torch.ones(1, 4))  # with its graph
    with pytest.raises(UsageError, match=r"cannot be copied .*: give the evaluator a newly created model"):
        Evaluator(model, loss_of, redis_url="redis://nowhere")
    with pytest.raises(UsageError, match="run="):
        Evaluator(made(), loss_of, run="a b", redis_url="redis://nowhere")


def test_the_copy_is_of_its_own_and_tied_as_the_model_is(redis_server: str) -> None:
    model = made()
    measured = Evaluator(model, loss_of, redis_url=redis_server)._measured.model
    assert measured.inner.weight is measured.again.weight  # type: ignore[union-attr]
    assert {id(one) for one in measured.parameters()}.isdisjoint(id(one) for one in model.parameters())
    assert {one.data_ptr() for one in measured.parameters()}.isdisjoint(one.data_ptr() for one in model.parameters())
