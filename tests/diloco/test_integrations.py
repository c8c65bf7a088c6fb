"""Promises about learners in other people's trainers, as far as they need none of these trainers."""

import asyncio
import importlib
import os
import re
import secrets
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from diloco.extras import naming_extra
from diloco.integrations.hosted import Hosted, check_schedule, tokens_of, wait_for_leaving
from diloco.integrations.loops import RunLoader
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import UsageError
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.settings import SyncSettings
from diloco.pipeline.view.status_reader import read_status
from diloco.workers.background import OwnThread
from diloco.workers.learner import Learner
from diloco.workers.stopping import Stopped
from tests.parties import python
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import on_bus, reports, threads, until

ROOT = Path(__file__).parents[2]
SYNC = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1)
IDS, PIXELS = torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 2, 2)


# --- what a batch holds -----------------------------------------------------------------------------------------

BATCHES = {
    "ids of a tokenizer's batch, padding and all": ({"attention_mask": PIXELS, "input_ids": IDS}, 15),
    "inputs and targets": ((IDS, IDS), 15),
    "a pair of a dict and something": ([{"tokens": IDS}, None], 15),
    "ids alone": (IDS, 15),
    "images: samples": ((PIXELS, IDS), 3),
    "numpy": ({"inputs": np.zeros((2, 7), np.int64)}, 14),
    "numpy, no whole numbers": (np.zeros((4, 7), np.float32), 4),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_holds_its_token_ids_else_its_samples(case: str) -> None:
    batch, held = BATCHES[case]
    assert tokens_of(batch) == held


@pytest.mark.parametrize("batch", [{"text": IDS}, ["a", "b"], torch.tensor(3), None, (), 7], ids=repr)
def test_a_batch_of_which_that_is_not_known_is_refused_with_what_to_do(batch: Any) -> None:
    with pytest.raises(UsageError, match="step_tokens="):
        tokens_of(batch)


# --- what is said early -----------------------------------------------------------------------------------------


def test_an_argument_that_no_learner_takes_is_refused_before_training() -> None:
    with pytest.raises(TypeError, match="budget"):
        RunLoader([], nn.Linear(1, 1), None, run="r", budget=7)
    with pytest.raises(UsageError, match="only once training has begun"):
        _ = Hosted(None, {}).present
    with pytest.raises(UsageError, match=r"progress_schedule\(warmup=2\)"):
        check_schedule({"warmup": 2})
    with pytest.raises(TypeError, match="shap"):
        check_schedule({"shap": "cosine"})
    check_schedule({"shape": "linear", "final": 0.0})
    check_schedule(None)


@pytest.mark.parametrize(("module", "extra"), [("transformers", "transformers"), ("lightning", "lightning")])
def test_without_its_trainer_an_integration_says_which_extra_it_needs(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is installed here or not."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"diloco.integrations.{module}", raising=False)
    said = f"diloco.integrations.{module} needs {module}, which is not installed: pip install 'diloco[{extra}]'"
    with pytest.raises(ModuleNotFoundError, match=re.escape(said)):
        importlib.import_module(f"diloco.integrations.{module}")
    with pytest.raises(ModuleNotFoundError, match="m needs no_such_thing"), naming_extra("m", "e"):
        __import__("no_such_thing")


# --- a loop of one's own ----------------------------------------------------------------------------------------


class Loop:
    """A model that learns to give ones, and a loader of three batches of two samples."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.batches = [torch.randn(2, 4) for _ in range(3)]

    def loader(self, url: str, run: str, **more: Any) -> RunLoader:
        return RunLoader(self.batches, self.model, self.optimizer, run=run, redis_url=url, sync=SYNC, **more)

    def learn(self, batch: torch.Tensor) -> torch.Tensor:
        loss = (self.model(batch) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(0.01)


@pytest.mark.redis
def test_a_loader_lasts_as_long_as_the_run_and_leaves_the_runs_model(redis_server: str) -> None:
    """Steps of three micro-batches; their samples are counted, the loss is told, and further epochs are empty."""
    loop, made = Loop(), 0
    with a_syncer(redis_server, "loader"), capture_logs() as log:
        loader = loop.loader(redis_server, "loader", tokens=240)
        for _ in range(3):
            for batch in loader:
                loss = loop.learn(batch)
                made += 1
                if made % 3 == 0:
                    loader.report_loss(loss)
                    loop.step()
                    training = loader.learner.joined.training
                    assert training.rounds.tokens == 2 * made
                    assert training.losses.shown() == float(loss.detach())
        assert made >= 120
        with pytest.raises(UsageError, match="only once training has begun"):
            _ = loader.learner
        other = Loop(seed=1)
        assert list(other.loader(redis_server, "loader")) == []
        assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), other.model.parameters(), strict=True))
    assert [one["finished"] for one in log if one["event"] == "globals_loaded"] == [True, True]
    assert not threads()


@pytest.mark.redis
def test_a_loop_that_is_left_leaves_the_run_and_may_come_back(redis_server: str) -> None:
    """By break, or by an error of its own; it is said that the run goes on. The model keeps its own values, which an
    error's cause may be looked for in; the learner of the loop loads the run's where they are wanted."""
    loop = Loop()
    with a_syncer(redis_server, "left", tokens=10**6):
        for leave in (StopIteration, ZeroDivisionError):
            with capture_logs() as log:
                try:
                    for batch in (loader := loop.loader(redis_server, "left", tokens=10**6)):
                        loop.learn(batch)
                        loop.step()
                        with torch.no_grad():
                            loop.model.bias.fill_(7.0)
                        learner = loader.learner
                        if leave is StopIteration:
                            break
                        raise leave
                except ZeroDivisionError:
                    pass
                assert [one["log_level"] for one in log if one["event"] == "trainer_ended_first"] == ["warning"]
            assert not threads()
            assert torch.equal(loop.model.bias, torch.full((4,), 7.0))
            learner.load_globals()
            assert not torch.equal(loop.model.bias, torch.full((4,), 7.0))
        with pytest.raises(UsageError, match="the loader is empty"):
            list(RunLoader([], loop.model, loop.optimizer, run="left", redis_url=redis_server))
        assert not threads()


HELD = """
import os, sys, threading, time
import torch
from diloco.integrations.loops import RunLoader
from diloco.pipeline.settings import SyncSettings

url, run, where = sys.argv[1:]
sync = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1)

def begin(batches):
    model = torch.nn.Linear(4, 100_000)  # of which a delta is encoded in another thread
    optimizer = torch.optim.AdamW(model.parameters())
    loader = RunLoader(batches, model, optimizer, run=run, redis_url=url, sync=sync, tokens=10**6)
    return model, optimizer, iter(loader)

def train(model, optimizer, held):
    for _ in range(3):
        model(next(held)).sum().backward()
        optimizer.step()

def slowly():
    yield torch.ones(2, 4)
    asked.set()
    time.sleep(60)

mine = begin([torch.ones(2, 4)])
thread = threading.Thread(target=train, args=mine)
if where == "on another thread":
    thread.start()
    thread.join()
else:
    train(*mine)
    time.sleep(1)  # all is published that is before leaving
if where == "beside one that is in use":
    asked, other = threading.Event(), begin(slowly())
    threading.Thread(target=train, args=other, daemon=True).start()
    asked.wait()
if where == "in the parent":
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print("THE CHILD HAS ENDED", file=sys.stderr, flush=True)
    train(*mine)
sys.exit(3)
"""
HELD_WHERE = {
    "on the main thread": (6, [True]),
    "on another thread": (6, [True]),
    "beside one that is in use": (6, [False, True]),
    "in the parent": (12, [True]),
}
"""Where an iterator is held -> tokens of what it trained, and which learners of the program have left."""


@pytest.mark.redis
@pytest.mark.parametrize(
    "where", [pytest.param(one, marks=pytest.mark.slow) if one == "on the main thread" else one for one in HELD_WHERE]
)  # in a parent it is held on the main thread too
def test_an_iterator_that_is_held_as_its_program_ends_leaves_the_run(redis_server: str, where: str) -> None:
    """Nobody closes it: all that was trained is published, and the program ends as it would without a learner. One that
    another thread still asks for a batch is told in words, and keeps no other from leaving. A child leaves nothing."""
    run = f"held-{secrets.token_hex(4)}"
    with a_syncer(redis_server, run, tokens=10**6):
        done = python("-c", HELD, redis_server, run, where)
        found = sorted((seen.report for seen in reports(redis_server, run)), key=lambda report: report.left)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("trainer_ended_first") == 1
    if where == "in the parent":
        assert "trainer_ended_first" in done.stderr.partition("THE CHILD HAS ENDED")[2]
    assert done.stderr.count("pass_not_left") == len(found) - 1
    assert (found[-1].tokens, [report.left for report in found]) == HELD_WHERE[where]
    assert 0 < found[-1].published <= 12 * 500_000


INTERRUPTED = """
import itertools, os, signal, sys
import torch
from torch import nn
from diloco import Learner, SyncSettings
from diloco.integrations.hosted import Hosted
from diloco.integrations.loops import RunLoader
from diloco.pipeline.process import interrupts

SYNC = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1)
url, run, how = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
given = {"run": run, "redis_url": url, "sync": SYNC}

def train(batches, step=lambda: None):
    for number, batch in enumerate(batches):
        model(batch).square().mean().backward()
        optimizer.step()
        step()
        if number == 5:
            os.kill(os.getpid(), signal.SIGINT)

if how == "own loop":
    with Learner(model, optimizer, **given) as learner:
        train(itertools.repeat(torch.ones(2, 4)), lambda: learner.step(2))
elif how == "loader":
    train(RunLoader([torch.ones(2, 4)], model, optimizer, **given))
elif how == "loop left":
    for batch in RunLoader([torch.ones(2, 4)], model, optimizer, **given):
        break
    interrupts.JUST_S = 0.0  # or wait for as long
    train(itertools.repeat(torch.ones(2, 4)))
else:
    hosted = Hosted(2, given)
    with hosted.begin(model, [optimizer], lambda: 2):
        pass
    if how == "training over":
        hosted.leave("")
    train(itertools.repeat(torch.ones(2, 4)))
"""


def test_a_training_that_does_not_begin_has_no_learner() -> None:
    """Not even the one of the training before."""
    hosted, closed = Hosted(1, {"run": "r"}), list[bool]()
    hosted.learner = cast(Any, SimpleNamespace(close=lambda save_state: closed.append(save_state)))
    with pytest.raises(UsageError, match="parameters"), hosted.begin(nn.Identity(), [], lambda: 1):
        pass
    assert (closed, hosted.learner) == ([False], None)


@pytest.mark.redis
@pytest.mark.parametrize("how", ["training over", "loop left"])
def test_ctrl_c_after_a_training_has_its_traceback(redis_server: str, how: str) -> None:
    """What the program does then is its own."""
    run = f"interrupted-{secrets.token_hex(4)}"
    with a_syncer(redis_server, run, tokens=10**6):
        done = python("-c", INTERRUPTED, redis_server, run, how)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "Traceback" in done.stderr


@pytest.mark.redis
@pytest.mark.parametrize("how", ["own loop", "loader", "trainer's callback"])
def test_ctrl_c_ends_a_learner_in_order_and_without_a_traceback(redis_server: str, how: str) -> None:
    """It has left its run with what it trained, and the program ends by the signal as any other."""
    run = f"interrupted-{secrets.token_hex(4)}"
    with a_syncer(redis_server, run, tokens=10**6):
        done = python("-c", INTERRUPTED, redis_server, run, how)
        (found,) = [seen.report for seen in reports(redis_server, run)]
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "Traceback" not in done.stderr
    assert "KeyboardInterrupt" not in done.stderr
    assert done.stderr.count("learner_left") == 1
    assert "pass_not_left" not in done.stderr
    assert (found.left, found.tokens > 0, found.published > 0) == (True, True, True)


@pytest.mark.redis
def test_an_iterator_that_is_dropped_on_the_learners_own_thread_leaves_the_run(redis_server: str) -> None:
    """The garbage collector runs on any thread; this one cannot wait for itself. The loader may be used again, once the
    run is left, and signals do what they did before."""
    loop, run = Loop(), f"dropped-{secrets.token_hex(4)}"
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def left() -> list[bool]:
        return [seen.report.left for seen in reports(redis_server, run)]

    with a_syncer(redis_server, run, tokens=10**6):
        loader = loop.loader(redis_server, run, tokens=10**6)
        held = [iter(loader)]
        loop.learn(next(held[0]))
        loop.step()
        with pytest.raises(UsageError, match=r"iterated already: close\(\) that iterator"):
            next(iter(loader))
        noted, exchange = signal.getsignal(signal.SIGTERM), loader.learner.joined.exchange
        flush = exchange.leave

        async def leave(within_s: float) -> bool:
            await asyncio.sleep(1)
            return await flush(within_s)

        exchange.leave = leave  # type: ignore[method-assign]
        loader.learner.joined.thread.call(held.clear)
        until(lambda: loader._hosted.learner is None)  # the list is empty before its iterator is closed
        assert left() == [False]
        for batch in loader:
            assert sorted(left()) == [False, True]
            assert signal.getsignal(signal.SIGTERM) not in (noted, signal.SIG_DFL)
            loop.learn(batch)
            loop.step()
            break
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        held.append(iter(loader))
        loop.learn(next(held[0]))
        loop.step()
        loader.learner.joined.thread.call(held.clear)
        until(lambda: left() == [True, True, True])
    signal.signal(signal.SIGTERM, before)


@pytest.mark.redis
def test_a_program_whose_trainer_was_asked_to_end_knows_the_status_to_end_with(redis_server: str) -> None:
    """75, and the trainer's loop has ended by itself: what stands behind it is done."""
    loop, run = Loop(), f"asked-{secrets.token_hex(4)}"
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with a_syncer(redis_server, run, tokens=10**6):
            loader = loop.loader(redis_server, run, tokens=10**6)
            for batch in loader:
                loop.learn(batch)
                loop.step()
                assert loader.exit_status == 0
                os.kill(os.getpid(), signal.SIGTERM)
            assert loader.exit_status == AGAIN_STATUS
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_comes_as_a_dropped_learner_leaves_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SystemExit` would end the thread in which it leaves, and nobody would know."""

    class Asked:
        id, over, finished, progress = "l0", False, False, 0.1

        def close(self) -> None:
            raise Stopped(signal.SIGTERM)

    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *how: killed.append(how))
    hosted = Hosted(1, {})
    hosted.learner = Asked()  # type: ignore[assignment]
    dropping = OwnThread("exchange", lambda: hosted.drop("more steps"))
    dropping.start()
    dropping.join()
    wait_for_leaving()
    assert killed == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.redis
@pytest.mark.parametrize("where", ["as steps are attached", "after that"])
def test_no_learner_is_left_behind_where_training_cannot_begin(
    redis_server: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends it, Ctrl-C too: a learner in the run that trains nothing would be waited for."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    loop, run = Loop(), f"begins-{secrets.token_hex(4)}"
    if where == "as steps are attached":
        monkeypatch.setattr(Learner, "attach", interrupted)
    with a_syncer(redis_server, run):
        hosted = Hosted(1, {"run": run, "redis_url": redis_server, "sync": SYNC})
        with pytest.raises(KeyboardInterrupt), hosted.begin(loop.model, [loop.optimizer], lambda: 1):
            interrupted()
        assert not threads()
        assert [seen.report.left for seen in reports(redis_server, run)] == [True]
    with pytest.raises(UsageError, match="only once training has begun"):
        _ = hosted.present


def test_the_share_at_which_a_trainer_ended_is_the_one_known_after_leaving() -> None:
    """What is flushed on leaving counts too."""

    class Left:
        id, over, finished, progress, exit_status = "l0", False, False, 0.1, 75

        def close(self) -> None:
            self.progress = 0.4

    hosted = Hosted(1, {})
    hosted.learner = Left()  # type: ignore[assignment]
    with capture_logs() as log:
        assert not hosted.leave("more steps")
    assert [one["detail"] for one in log if one["event"] == "trainer_ended_first"] == [
        "the trainer ended at about 40.0% of the run, which continues without it: more steps"
    ]


@pytest.mark.redis
def test_a_learner_that_comes_after_the_end_leaves_the_sums_of_the_run_as_they_are(redis_server: str) -> None:
    """It may step once before it looks, as trainers do: that counts no tokens, and none of them died. It is said that
    the run is over, and no other optimizer is suspected where it takes no step."""
    run = f"late-{secrets.token_hex(4)}"

    def ledger() -> tuple[Any, ...]:
        status = on_bus(redis_server, run, lambda bus: read_status(bus, LoopClock()))
        return status["phase"], status["tokens"], status["tokens_lost"]

    with a_syncer(redis_server, run):
        loop = Loop()
        for batch in loop.loader(redis_server, run, tokens=240):
            loop.learn(batch)
            loop.step()
    before = ledger()
    assert before[0] == "finished"
    for steps in (1, 0):
        loop = Loop(seed=1)
        with capture_logs() as log, Learner(loop.model, loop.optimizer, run=run, redis_url=redis_server) as learner:
            learner.attach(tokens=1024)
            assert learner.finished
            for batch in loop.batches[:steps]:
                loop.learn(batch)
                loop.step()
        events = [one["event"] for one in log]
        assert events.count("run_finished_already") == 1
        assert "no_step_counted" not in events
    assert ledger() == before


@pytest.mark.redis
def test_an_optimizer_that_was_replaced_is_noticed(redis_server: str) -> None:
    """Its steps are nobody's: what the loop trained was counted nowhere."""
    loop = Loop()
    with a_syncer(redis_server, "replaced-loader", tokens=10**6), capture_logs() as log:
        loader = loop.loader(redis_server, "replaced-loader", tokens=10**6)
        loop.optimizer = torch.optim.AdamW(loop.model.parameters())
        for at, batch in enumerate(loader):
            loop.learn(batch)
            loop.step()
            if at == 3:
                break
    assert [one["log_level"] for one in log if one["event"] == "no_step_counted"] == ["warning"]
