"""Promises about the schedule by a run's progress, and about the budget that it goes by."""

import asyncio
import copy
import pickle
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.messages.spec import Wanted
from diloco.pipeline.methods import METHODS
from diloco.pipeline.settings import SyncerProcess, SyncSettings
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.service import SyncerService
from diloco.workers.learner import Learner
from diloco.workers.progress_schedule import Shape, ShareByProgress, share_by_progress
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import on_bus, until
from tests.workers.test_trial_step import Accelerated


def learner_of(url: str, run: str, **more: Any) -> Learner:
    model = nn.Linear(4, 4)
    return Learner(model, torch.optim.AdamW(model.parameters(), lr=2.0), run=run, redis_url=url, **more)


# --- the curve ------------------------------------------------------------------------------------------------

CURVES: dict[Shape, dict[float, float]] = {
    "cosine": {0.05: 0.5, 0.1: 1.0, 0.55: 0.6, 1.0: 0.2, 1.5: 0.2},
    "linear": {0.05: 0.5, 0.1: 1.0, 0.55: 0.6, 1.0: 0.2, 1.5: 0.2},
    "constant": {0.05: 0.5, 0.1: 1.0, 0.7: 1.0, 0.75: 1.0, 0.875: 0.6, 1.0: 0.2, 1.5: 0.2},
}


@pytest.mark.parametrize("shape", CURVES)
def test_each_shape_rises_and_falls_where_it_was_told_to(shape: Shape) -> None:
    share = share_by_progress(shape, warmup=0.1, decay=0.25, final=0.2)
    for progress, expected in CURVES[shape].items():
        assert share(progress, 100, 0) == pytest.approx(expected), progress
        assert share(progress, 4, 20) == pytest.approx(expected / 4), "young moments ramp up besides"
    assert 0 < share(0.0, 0, 0) < 0.1
    without = share_by_progress(shape, warmup=0.0, decay=0.0, final=1.0)
    assert {without(progress / 10, 0, 0) for progress in range(11)} == {1.0}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shape": "wsd"}, "shape='wsd'.*one of cosine, linear, constant"),
        ({"warmup": 1.0}, "warmup=1.0.*less than 1"),
        ({"warmup": -0.1}, "warmup=-0.1"),
        ({"decay": 1.1}, "decay=1.1.*at most 1"),
        ({"final": float("nan")}, "final=nan"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "holds none of the model's trained parameters"),
    ],
    ids=str,
)
def test_what_makes_no_curve_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        learner_of("redis://nowhere", "r").progress_schedule(**given)


# --- a learner's ----------------------------------------------------------------------------------------------


@pytest.mark.redis
def test_rates_go_by_the_runs_progress_before_joining_while_training_and_after_a_restart(redis_server: str) -> None:
    """Others' tokens count; a restart goes on where the run is; a learner without moments ramps up besides."""
    sync = SyncSettings(fragments=1, sync_interval=1, first_interval=0)
    with a_syncer(redis_server, "rates"):
        first = learner_of(redis_server, "rates", sync=sync, tokens="10k", recover="fresh", learner_id="l0")
        model_optimizer = first.optimizer
        assert isinstance(model_optimizer, torch.optim.Optimizer)
        scheduler = first.progress_schedule(shape="linear", warmup=0.1, final=0.0)
        assert scheduler.get_last_lr() == [pytest.approx(2.0 * 0.02)]
        with first:
            tokens = [2000] * 3
            first.attach(tokens=lambda: tokens.pop() if tokens else 0)
            for steps in (1, 2, 3):
                model_optimizer.step()
                until(lambda at=0.2 * steps: first.progress == pytest.approx(at))
                scheduler.step()
                assert scheduler.get_last_lr() == [pytest.approx(2.0 * (1.0 - (0.2 * steps - 0.1) / 0.9))]
            until(lambda: first.joined.training.rounds.versions[0] > 0 or (model_optimizer.step(), False)[1])
            saved = scheduler.state_dict()
        assert "learner" not in repr(saved).lower()
        again = learner_of(redis_server, "rates", recover="fresh", learner_id="l0")
        scheduler = again.progress_schedule(Accelerated(again.optimizer), shape="linear", warmup=0.1, final=0.0)  # type: ignore[arg-type]
        scheduler.load_state_dict(saved)  # as trainers do
        with again:
            assert again.recovered == "fresh"
            assert isinstance(again.optimizer, torch.optim.Optimizer)
            again.optimizer.step()
            scheduler.step()
            here = 2.0 * (1.0 - (0.6 - 0.1) / 0.9)
            assert scheduler.get_last_lr() == [pytest.approx(here / 20)]
            for _ in range(20):
                again.step(0)
            scheduler.step()
            assert scheduler.get_last_lr() == [pytest.approx(here)]


def test_a_copy_stays_where_the_run_was() -> None:
    """Pickled with its optimizer, as trainers' objects are; it knows no learner any more."""
    schedule = learner_of("redis://nowhere", "r").progress_schedule(shape="linear", warmup=0.0, final=0.5)
    for copied in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):  # noqa: S301
        assert copied.get_last_lr() == schedule.get_last_lr()
        assert copied.lr_lambdas[0](7) == schedule.lr_lambdas[0](0) == 1.0
        assert copied.state_dict()["lr_lambdas"] == schedule.state_dict()["lr_lambdas"] == [{}]
    half = ShareByProgress(("linear", 0.0, 0.2, 0.5), lambda: (0.5, 100, 0))
    assert pickle.loads(pickle.dumps(half))(0) == half(0) == 0.75  # noqa: S301


# --- the budget -----------------------------------------------------------------------------------------------


@pytest.mark.redis
def test_the_first_learner_that_has_a_budget_sets_it_and_another_one_is_refused(redis_server: str) -> None:
    """With the difference. One that says nothing, or the same, follows."""
    with a_syncer(redis_server, "budget"), learner_of(redis_server, "budget", tokens="4k") as learner:
        assert learner.spec.sync.tokens == 4000
        for tokens in (None, 4000, "4e3"):
            with learner_of(redis_server, "budget", tokens=tokens) as other:
                assert other.spec == learner.spec
        with learner_of(redis_server, "budget", sync=SyncSettings()) as other:
            assert other.spec == learner.spec
        with pytest.raises(SpecMismatch, match=r"sync.tokens: here 5000, the run has 4000"):
            learner_of(redis_server, "budget", tokens=5000).open()


@pytest.mark.redis
def test_a_syncer_that_is_first_sets_the_budget(redis_server: str) -> None:
    """It waits for the first learner, which takes it, or is refused with the difference; so is another syncer."""
    with a_syncer(redis_server, "waits", tokens=4000):
        until(lambda: on_bus(redis_server, "waits", lambda bus: bus.read_wanted()) == Wanted(sync={"tokens": 4000}))
        for told in ({"tokens": 5000}, {"sync": SyncSettings(tokens=5000)}):
            with pytest.raises(SpecMismatch, match="tokens: here 5000, a waiting syncer has 4000"):
                learner_of(redis_server, "waits", **told).open()

        async def another(bus: Any) -> None:
            process = SyncerProcess(syncer_id="other", http_port=0, tokens=6000)
            await SyncerService(bus, LoopClock(), process, Metrics()).run(asyncio.Event())

        with pytest.raises(SpecMismatch, match="tokens: here 6000, a waiting syncer has 4000"):
            asyncio.run(connected(redis_server, "waits", another))
        with learner_of(redis_server, "waits", sync=SyncSettings(quorum=1)) as learner:
            assert learner.spec.sync.tokens == 4000
            assert learner.recovered == "start"


@pytest.mark.redis
def test_a_syncer_that_is_first_sets_all_that_it_was_given(redis_server: str) -> None:
    """A method too: its learners need not say it. Who says otherwise is refused."""
    with a_syncer(redis_server, "paper", method="paper", outer_lr=0.4):
        until(lambda: on_bus(redis_server, "paper", lambda bus: bus.read_wanted()) is not None)
        for told, said in (({"outer": "halley"}, "outer: here 'halley'"), ({"method": "streaming"}, "method: here")):
            with pytest.raises(SpecMismatch, match=said):
                learner_of(redis_server, "paper", sync=SyncSettings(quorum=1, **told)).open()
        with learner_of(redis_server, "paper") as learner:
            meant = METHODS["paper"].settings | {"outer_lr": 0.4, "fragments": 2}  # a tensor each
            assert {name: getattr(learner.spec.sync, name) for name in meant} == meant
        with learner_of(redis_server, "paper", sync=SyncSettings(method="paper", outer_lr=0.4)) as learner:
            assert learner.recovered == "start"


@pytest.mark.redis
def test_a_learner_says_a_method_in_one_word(redis_server: str) -> None:
    with (
        a_syncer(redis_server, "one-word"),
        learner_of(redis_server, "one-word", sync=SyncSettings(method="paper")) as one,
    ):
        assert not one.spec.sync.stretch
        assert (one.spec.sync.merge, one.spec.sync.outer, one.spec.sync.fragments) == ("rda", "nesterov", 2)
    learner_of("redis://nowhere", "nobody", sync=SyncSettings(method="paper", outer_momentum=0))  # Nesterov: it may be
    with pytest.raises(UsageError, match="method=diloco merges all learners: set"):
        learner_of(redis_server, "nobody", sync=SyncSettings(method="diloco")).open()


async def connected(url: str, run: str, use: Any) -> None:
    bus = await connect(url, run)
    try:
        await use(bus)
    finally:
        await bus.close()


@pytest.mark.redis
def test_a_budget_that_nobody_has_set_is_said(redis_server: str) -> None:
    """It ends a run as any other does: whoever has not thought of it sees so when it begins."""
    for run, told, said in (("unsaid", {}, [2_500_000]), ("said", {"tokens": 7}, [])):
        with a_syncer(redis_server, run), capture_logs() as log, learner_of(redis_server, run, **told):
            assert [one["tokens"] for one in log if one["event"] == "budget_assumed"] == said


@pytest.mark.redis
def test_a_variable_that_comes_too_late_is_said_to_be_of_no_effect(
    redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for the first learner: whoever sets it for a later one would take the run's end for another."""
    with a_syncer(redis_server, "late"), learner_of(redis_server, "late", tokens=4000) as first:
        monkeypatch.setenv("DILOCO_TOKENS", "5k")
        monkeypatch.setenv("DILOCO_SYNC_INTERVAL", str(first.spec.sync.sync_interval))
        with capture_logs() as log, learner_of(redis_server, "late") as later:
            assert later.spec == first.spec
        (said,) = [one for one in log if one["event"] == "variable_ignored"]
        assert said["detail"] == "DILOCO_TOKENS is 5000, but the run was started with 4000, which applies"


def test_a_budget_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"^Learner: tokens='1x': not a whole number, such as 4000, 4e3 or 2.5M$"):
        learner_of("redis://nowhere", "r", tokens="1x")
    for tokens, said in ((0, "tokens=0"), ("many", "tokens='many'"), (2.5, "tokens=2.5"), (True, "tokens=True")):
        with pytest.raises(UsageError, match=f"Learner: {said}"):
            learner_of("redis://nowhere", "r", tokens=tokens)
    with pytest.raises(UsageError, match="the budget is given twice"):
        learner_of("redis://nowhere", "r", tokens=5, sync=SyncSettings(tokens=5))
