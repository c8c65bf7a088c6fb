"""Entering, leaving and being ended: the `Learner` itself, on a real Redis."""

import _thread
import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from diloco import cli
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.errors import LearnerReplaced, SpecMismatch, UsageError
from diloco.pipeline.messages.run import LearnerReport, Phase, SeenReport
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import party_name
from diloco.pipeline.payload import codec
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.settings import SyncerProcess, SyncSettings
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.service import SyncerService
from diloco.workers.background import BackgroundThread
from diloco.workers.learner import Learner
from diloco.workers.moments.keeper import Keeper
from diloco.workers.moments.recovery import FoundMoments
from diloco.workers.stopping import STOPS, Stopped, Stopping
from tests import HANGING_S, samples
from tests.parties import wait_for
from tests.workers.test_device_encoding import a_syncer

pytestmark = pytest.mark.redis
SYNC = SyncSettings(fragments=1, sync_interval=1, first_interval=0, quorum=1, tokens=2**40)
INTERRUPTS = (signal.SIGINT, *STOPS)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """As a program finds them that has no handlers of its own."""
    before = {number: signal.getsignal(number) for number in INTERRUPTS}
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def on_bus(url: str, run: str, ask: Callable[[Any], Any]) -> Any:
    """One call, from a thread of its own: the test's may be in a loop."""
    found: list[Any] = []

    async def main() -> None:
        bus = await connect(url, run)
        try:
            found.append(await ask(bus))
        finally:
            await bus.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join()
    return found[0]


def reports(url: str, run: str) -> list[SeenReport]:
    found: list[SeenReport] = on_bus(url, run, lambda bus: bus.read_reports())
    return found


def write(url: str, run: str, report: LearnerReport) -> None:
    on_bus(url, run, lambda bus: bus.write_report(report))


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANGING_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def learner_of(url: str, run: str, **more: Any) -> Learner:
    torch.manual_seed(0)
    model = more.pop("model", None) or nn.Linear(4, 4)
    return Learner(model, torch.optim.AdamW(model.parameters()), run=run, redis_url=url, **{"sync": SYNC} | more)


def steps_of(learner: Learner, most: int, signalled: int, number: int) -> None:
    """A loop that gets a signal in one of its steps and does not ask."""
    until(lambda: learner.joined.shared.state)  # without it no state is saved
    for made in range(1, most + 1):
        if made == signalled:
            os.kill(os.getpid(), number)
        learner.step(1)


def steps_until(learner: Learner, error: type[BaseException]) -> None:
    """A loop that ends by an error."""
    until(lambda: learner.joined.shared.state)  # without it no state is saved
    assert learner.optimizer is not None
    for parameter in learner.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    learner.optimizer.step()
    learner.step(1)
    raise error


def steps_on(learner: Learner) -> None:
    """Until the exchange says why not."""
    until(lambda: learner.step(1) or time.sleep(0.05))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "exchange"]


def a_merge(learner: Learner) -> None:
    """Steps until something is adopted that was trained."""
    until(lambda: learner.joined.shared.state)  # without it no state is saved
    until(lambda: learner.step(1) or max(learner.joined.training.rounds.versions) > 0)


# --- entering ------------------------------------------------------------------------------------------------


def test_a_learner_is_opened_once(redis_server: str) -> None:
    """Again, one in the other, and after it could not join: refused, and what is under way goes on."""
    with a_syncer(redis_server, "once"):
        learner = learner_of(redis_server, "once")
        with learner:
            with pytest.raises(UsageError, match="opened only once: create a new one"), learner:
                pass
            learner.step(1)
        assert learner.left_in_order
        with pytest.raises(UsageError, match="opened only once"), learner:
            pass
        with pytest.raises(UsageError, match="not in a run"):
            learner.step(1)
        broken = nn.Linear(4, 4)
        with torch.no_grad():
            broken.weight.fill_(float("nan"))
        with learner_of(redis_server, "once"):
            pass
    refused = learner_of(redis_server, "nan", model=broken)
    for match in ("not finite", "opened only once"):
        with pytest.raises(UsageError, match=match), refused:
            pass
    assert [seen.report.left for seen in reports(redis_server, "nan")] == [True]
    assert not threads()


def test_two_learners_do_not_train_one_model(redis_server: str) -> None:
    """Not even a part of it; once the first one is closed, the second may."""
    model = nn.Linear(4, 4)
    with a_syncer(redis_server, "shared"):
        with learner_of(redis_server, "shared", model=model, learner_id="l0") as first:
            second = learner_of(redis_server, "shared", model=nn.Sequential(model, nn.Linear(4, 4)))
            with pytest.raises(UsageError, match="this model is already trained by learner l0"), second:
                pass
            first.step(1)
        with learner_of(redis_server, "shared", model=model) as third:
            third.step(1)


def test_a_learner_that_nothing_refers_to_leaves(redis_server: str) -> None:
    """As when a cell of a notebook is run twice; one that is attached is held by its optimizer."""
    model, run = nn.Linear(4, 4), "dropped"
    optimizer = torch.optim.SGD(model.parameters())
    with a_syncer(redis_server, run), capture_logs() as log:
        held = Learner(model, optimizer, run=run, redis_url=redis_server, sync=SYNC, learner_id="l0").open()
        held.attach(1)
        attached = weakref.ref(held)
        del held
        gc.collect()
        learner_of(redis_server, run, learner_id="l1").open()
        gc.collect()
        until(lambda: len(threads()) == 1)
        until(lambda: {seen.report.learner: seen.report.left for seen in reports(redis_server, run)}["l1"])
        assert [line["learner"] for line in log if line["event"] == "learner_dropped"] == ["l1"]
        (told,) = [line["detail"] for line in log if line["event"] == "learner_still_open"]
        assert told == "learner l0 of this run is still attached in this process, and counts as live: close() it"
        left = attached()
        assert left is not None
        left.close()
        assert left.left_in_order


def test_a_learner_is_of_the_process_that_made_it(redis_server: str) -> None:
    """A fork has none of its threads: it is told so, and does not hang or end the parent's run by leaving."""
    with a_syncer(redis_server, "fork"), learner_of(redis_server, "fork") as learner:
        parents = learner._pid
        learner._pid = -1  # as a child sees it
        for use in (lambda: learner.step(1), lambda: learner.__enter__(), lambda: next(learner.blocks(8, 4))):
            with pytest.raises(UsageError, match="created in the process"):
                use()
        learner.close()
        learner._pid = parents
        learner.step(1)
        assert [seen.report.left for seen in reports(redis_server, "fork")] == [False]


def test_a_host_of_any_name_makes_names_that_parties_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "B\u00fcro {2}: Anna's")
    names = learner_of("redis://nowhere", "ids").id, SyncerService(None, None, SyncerProcess(), Metrics()).id  # type: ignore[arg-type]
    assert all(party_name(name).startswith("B-ro--2---Anna-s-") for name in names)


def test_learners_of_one_process_have_ids_of_their_own() -> None:
    """Also where every process is number 1 of a container on its host's network."""
    names = {learner_of("redis://nowhere", "ids").id for _ in range(3)}
    assert len(names) == 3
    assert len({SyncerService(None, None, SyncerProcess(), Metrics()).id for _ in range(3)}) == 3  # type: ignore[arg-type]


def test_moments_that_are_put_back_are_held_once(
    redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the optimizer: what was loaded for it is let go of, though the learner trains on."""
    restore, loaded = Keeper.restore, list[weakref.ref[Any]]()

    def noting(keeper: Keeper, found: FoundMoments) -> None:
        if found.moments is not None:
            loaded.extend(weakref.ref(flat) for flats in found.moments.flats for flat in flats.values())
        restore(keeper, found)

    monkeypatch.setattr(Keeper, "restore", noting)
    with a_syncer(redis_server, "held-once"):
        for source in ("start", "checkpoint"):
            with learner_of(redis_server, "held-once", learner_id="l0", state_dir=tmp_path) as learner:
                a_merge(learner)
                assert learner.recovered == source
                gc.collect()
                assert all(one() is None for one in loaded)
    assert loaded


@pytest.mark.parametrize("encode_on", ["cpu", "device"])
def test_a_learner_that_has_left_holds_no_bases(redis_server: str, encode_on: Any) -> None:
    """Nor what its deltas have lost. It can still be asked for the run's model, and what it has done."""
    run = f"left-{encode_on}"
    with a_syncer(redis_server, run):
        learner = learner_of(redis_server, run, encode_on=encode_on, sync=SYNC.model_copy(update={"codec": "int8"}))
        with learner:
            a_merge(learner)
            carrier: Any = learner.joined.exchange.carrier
            vectors = carrier._bases[0].values, carrier.feedback.residual(0)
            held, versions = list(map(weakref.ref, vectors)), learner.joined.training.rounds.versions
            del carrier, vectors
        gc.collect()
        assert all(one() is None for one in held)
        assert learner._once_joined.training.rounds.versions >= versions
        learner.load_globals()
        assert not learner.over


# --- joining that comes to nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stopped)])
def test_a_signal_while_joining_leaves_no_learner_behind(redis_server: str, number: int, error: Any) -> None:
    """Nobody serves the run yet: it waits, counts as live, and is gone when the signal has come."""
    run = f"interrupted-{number}"

    def interrupt() -> None:
        until(lambda: [seen.report.left for seen in reports(redis_server, run)] == [False])
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(error) as ended, learner_of(redis_server, run):
        pass
    thread.join()
    assert [seen.report.left for seen in reports(redis_server, run)] == [True]
    assert not threads()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if error is Stopped:
        assert ended.value.code == AGAIN_STATUS
    time.sleep(0.5)  # more than lies between two reports
    assert [seen.report.left for seen in reports(redis_server, run)] == [True]


def test_a_signal_while_there_is_no_redis_ends_the_waiting(tmp_path: Path) -> None:
    for more in ({}, {"sync": None}):
        waits = Learner(nn.Linear(2, 2), redis_url=f"unix://{tmp_path}/none", **({"sync": SYNC} | more))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Stopped), waits:
            pass
        assert not threads()


def test_what_fails_after_joining_leaves_no_learner_behind(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no room for moments")

    monkeypatch.setattr("diloco.workers.moments.keeper.Keeper.restore", fails)
    with a_syncer(redis_server, "restore"):
        with pytest.raises(MemoryError), learner_of(redis_server, "restore"):
            pass
        assert [seen.report.left for seen in reports(redis_server, "restore")] == [True]
        assert not threads()


def test_a_second_ctrl_c_while_leaving_ends_the_thread(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program goes on, as a notebook does, nothing reports any more: others take it for gone in time."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with a_syncer(redis_server, "twice"):
        learner = learner_of(redis_server, "twice")
        monkeypatch.setattr("diloco.workers.moments.keeper.Keeper.close", interrupted)
        with pytest.raises(KeyboardInterrupt), learner:
            learner.step(1)
        until(lambda: not threads())


@pytest.mark.parametrize(("error", "saved"), [(KeyboardInterrupt, True), (SystemExit, True), (RuntimeError, False)])
def test_ctrl_c_saves_the_state_and_an_error_keeps_the_one_before(
    redis_server: str, tmp_path: Path, error: Any, saved: bool
) -> None:
    run = f"left-by-{error.__name__}"
    with a_syncer(redis_server, run):
        learner = learner_of(redis_server, run, state_dir=str(tmp_path))
        with pytest.raises(error), learner:
            steps_until(learner, error)
    assert (tmp_path / "state.json").exists() == saved


def test_an_error_of_the_loop_is_not_hidden_by_one_of_leaving(
    redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failed computation, whose values cannot be read for a last delta either."""

    def fails(*_: Any) -> None:
        raise RuntimeError("the device has failed")

    with a_syncer(redis_server, "hidden"), capture_logs() as logs:
        learner = learner_of(redis_server, "hidden")
        monkeypatch.setattr("diloco.workers.moments.keeper.Keeper.close", fails)
        with pytest.raises(ZeroDivisionError), learner:
            learner.step(tokens=1 // 0)
        until(lambda: not threads())
    (told,) = [line["error"] for line in logs if line["event"] == "leaving_failed"]
    assert "the device has failed" in told


@pytest.mark.parametrize("saves", [True, False])
def test_a_learner_whose_device_can_copy_no_more_leaves_and_says_what_it_withheld(
    redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """The delta that it cannot copy is withheld, which is told. What it can copy is published and saved."""
    run, turns = f"copies-{saves}", SYNC.model_copy(update={"fragments": 2, "sync_interval": 100})
    error = torch.OutOfMemoryError("no memory") if saves else RuntimeError("the device has failed")

    def fails(*_: Any) -> bool:
        raise error

    model = nn.Linear(4, 4)
    how: Any = {"redis_url": redis_server, "sync": turns, "state_dir": str(tmp_path)}
    with a_syncer(redis_server, run), capture_logs() as logs:
        with Learner(model, torch.optim.AdamW(model.parameters()), run=run, **how) as learner:
            steps_of(learner, 2, 0, 0)  # the first fragment is due at once, the second one in its turn
            parameters, exchange = learner.joined.training.parameters, learner.joined.exchange
            snapshot = parameters.snapshot
            monkeypatch.setattr(parameters, "snapshot", lambda p: fails() if p else snapshot(p))
            if not saves:
                monkeypatch.setattr("diloco.workers.moments.optimizer_state.StateCopy.advance", fails)
        assert not learner.left_in_order
    told = [(line["event"], line["error"]) for line in logs if "error" in line]
    assert told == [(event, str(error)) for event in ("last_delta_withheld", "state_not_saved")[: 2 - saves]]
    assert exchange.publishing.newest.keys() == {0}
    assert (tmp_path / "state.json").exists() is saves
    assert [seen.report.left for seen in reports(redis_server, run)] == [True]


# --- the id is taken --------------------------------------------------------------------------------------------


def test_a_replaced_learner_is_told_at_its_next_call(redis_server: str) -> None:
    """Its `close` does not raise again what its loop has seen, and does not wait for anything."""
    with a_syncer(redis_server, "replaced"):
        learner = learner_of(redis_server, "replaced", learner_id="l0")
        successor = samples.report("l0", incarnation="f" * 16, generation=2, versions=(0,))
        threading.Timer(1.0, write, (redis_server, "replaced", successor)).start()
        with pytest.raises(LearnerReplaced, match="has replaced learner 'l0'"), learner:
            steps_on(learner)
        assert not learner.left_in_order
        assert not threads()


def test_one_that_is_replaced_while_it_leaves_says_so(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_syncer(redis_server, "leaves"):
        learner = learner_of(redis_server, "leaves", learner_id="l0")

        def close(*_: Any) -> None:
            write(redis_server, "leaves", samples.report("l0", incarnation="f" * 16, generation=2, versions=(0,)))

        monkeypatch.setattr("diloco.workers.moments.keeper.Keeper.close", close)
        monkeypatch.setattr(
            "diloco.workers.exchange.work_queue.ShardClaims.leave", lambda claims: None
        )  # it does not leave before
        with pytest.raises(LearnerReplaced), learner:
            learner.step(1)
        assert not threads()


def test_the_command_says_that_an_id_is_taken_in_one_line(
    redis_server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, no traceback."""
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    told = ["learner", "--redis-url", redis_server, "--run", "command", "--learner-id", "l0", "--threads", "1"]
    told += ["--data", str(tmp_path / "text"), "--model", "tiny", "--seq-len", "32"]
    stop = threading.Event()

    def report(number: int) -> None:
        write(redis_server, "command", samples.report("l0", number=number, host="other-host", generation=3))

    def live() -> None:
        number = 1
        while not stop.wait(0.1):
            number += 1
            report(number)

    report(1)
    thread = threading.Thread(target=live)
    thread.start()
    try:
        assert cli.main(told) == 1
    finally:
        stop.set()
        thread.join()
    lines = [line for line in capfd.readouterr().err.splitlines() if "l0" in line]
    assert lines[-1].startswith(
        "error: another process is already learner 'l0' (incarnation 00000000 on host other-host, "
    )
    assert "Traceback" not in "".join(lines)


# --- SIGTERM in somebody's own loop ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", STOPS)
def test_a_loop_that_asks_leaves_in_order_after_a_signal(redis_server: str, tmp_path: Path, number: int) -> None:
    """The step is over, all is flushed and saved, what stands behind the loop is done, and the handler is gone."""
    run = f"asks-{number}"
    with a_syncer(redis_server, run):
        learner, steps = learner_of(redis_server, run, state_dir=tmp_path), 0
        with learner:
            steps_of(learner, 0, 0, 0)
            while not learner.finished:
                steps += 1
                if steps == 3:
                    os.kill(os.getpid(), number)
                learner.step(1)
    assert steps == 3
    assert learner.exit_status == AGAIN_STATUS
    assert learner.left_in_order
    assert (tmp_path / "state.json").exists()
    assert [(seen.report.left, seen.report.step) for seen in reports(redis_server, run)] == [(True, 3)]
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("steps", [3, 100])
def test_a_loop_that_does_not_ask_is_ended_between_two_steps(redis_server: str, tmp_path: Path, steps: int) -> None:
    """Or, if it ends by itself before, behind it; with status 75 either way, flushed and saved."""
    run = f"deaf-{steps}"
    with a_syncer(redis_server, run):
        learner = learner_of(redis_server, run, state_dir=tmp_path)
        with pytest.raises(Stopped) as ended, learner:
            steps_of(learner, steps, 3, signal.SIGTERM)
    assert ended.value.code == learner.exit_status == AGAIN_STATUS
    assert learner.left_in_order
    assert (tmp_path / "state.json").exists()
    assert [(seen.report.left, seen.report.step) for seen in reports(redis_server, run)] == [(True, min(steps, 4))]


def test_a_loop_that_trains_on_after_the_runs_end_is_warned_once(redis_server: str) -> None:
    """Not of the step that begins before the end, nor while the run drains."""
    sync = SYNC.model_copy(update={"tokens": 30})

    def has_ended() -> bool:
        state = learner.joined.shared.state
        return state is not None and state.phase is Phase.FINISHED

    with (
        a_syncer(redis_server, "beyond"),
        learner_of(redis_server, "beyond", sync=sync) as learner,
        capture_logs() as log,
    ):
        until(lambda: has_ended() or learner.step(1))
        assert "trained_after_end" not in [line["event"] for line in log]
        for _ in range(3):
            learner.step(1)
    (told,) = [line for line in log if line["event"] == "trained_after_end"]
    assert "learner.finished" in told["detail"]


def test_the_spec_of_a_name_that_no_run_can_have_is_refused(redis_server: str) -> None:
    assert Learner.read_spec(redis_server, "nobodys") is None
    with pytest.raises(UsageError, match="run='a b': cannot be a name"):
        Learner.read_spec(redis_server, "a b")


def test_a_long_value_that_differs_is_shown_in_short(redis_server: str) -> None:
    with a_syncer(redis_server, "long"), learner_of(redis_server, "long"):
        other = learner_of(redis_server, "long", trainer={"a": "y" * 10**6})
        with (
            pytest.raises(SpecMismatch, match=r"trainer.a: here 'y+\.\.\. \(1000002 characters\), the") as refused,
            other,
        ):
            pass
    assert len(str(refused.value)) < 2000


def test_a_programs_own_handler_stays(redis_server: str) -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    own = signal.getsignal(signal.SIGTERM)
    with a_syncer(redis_server, "own"), learner_of(redis_server, "own") as learner:
        os.kill(os.getpid(), signal.SIGTERM)
        learner.step(1)
        assert not learner.finished
    assert came == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_second_signal_and_a_forked_child_end_as_by_default() -> None:
    """A child that loads data must not outlive the SIGTERM of who started it."""
    for child in (False, True):
        stopping = Stopping()
        stopping.install()
        pid = os.fork()
        if pid == 0:
            if not child:  # the same process, as far as it can tell
                stopping._pid = os.getpid()
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        stopping.restore()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_a_process_asked_while_another_thread_trains_is_not_touched() -> None:
    """Handlers are the main thread's."""
    thread = threading.Thread(target=Stopping().install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_after_a_learner_was_closed_in_another_thread_a_signal_ends_the_process() -> None:
    """Its handler stays, since only the main thread may change it, but swallows nothing; the next learner's replaces
    it."""
    closed, later = Stopping(), Stopping()
    closed.install()
    noted = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=closed.restore)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == noted
    pid = os.fork()
    if pid == 0:
        closed._pid = os.getpid()  # the same process, as far as it can tell
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    later.install()
    assert signal.getsignal(signal.SIGTERM) == later._note
    later.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("busy_s", [0.0, 3.0])
def test_a_learner_that_was_replaced_after_its_last_step_says_so_on_leaving(redis_server: str, busy_s: float) -> None:
    """Also while its thread's own work still goes on: leaving neither hangs nor is silent."""
    run = f"late-{busy_s:g}"
    with a_syncer(redis_server, run):
        learner = learner_of(redis_server, run)

        async def refused(report: LearnerReport) -> None:
            raise LearnerReplaced("another one has its place", 2)

        def train() -> None:
            with learner:
                learner.step(1)
                if busy_s:
                    learner.joined.thread.ask(asyncio.to_thread(time.sleep, busy_s))
                    time.sleep(0.1)
                thread = learner.joined.thread
                learner.joined.exchange.reporting._identity.write = refused  # type: ignore[method-assign, assignment]
                if not busy_s:
                    until(lambda: thread.failure)

        with pytest.raises(LearnerReplaced):
            train()


def test_another_close_while_the_first_one_flushes_changes_nothing(redis_server: str) -> None:
    """From another thread, say: what is on its way is published all the same."""
    with a_syncer(redis_server, "closed-twice"):
        learner = learner_of(redis_server, "closed-twice")
        learner.__enter__()
        learner.step(1)
        exchange = learner.joined.exchange
        flush, flushing = exchange.leave, threading.Event()

        async def leave(deadline_s: float) -> bool:
            flushing.set()
            await asyncio.sleep(0.5)
            return await flush(deadline_s)

        exchange.leave = leave  # type: ignore[method-assign]
        closing = threading.Thread(target=learner.close)
        closing.start()
        assert flushing.wait(HANGING_S)
        learner.close()
        closing.join()
        assert learner.left_in_order
        assert [seen.report.left for seen in reports(redis_server, "closed-twice")] == [True]


@pytest.mark.parametrize("second", [signal.SIGHUP, signal.SIGTERM])
def test_a_hangup_that_is_followed_by_another_signal_ends_a_loop_in_order(second: signal.Signals) -> None:
    """A closed terminal tells twice as a rule."""
    stopping = Stopping()
    stopping.install()
    try:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(second)
        assert stopping.asked
    finally:
        stopping.restore()


def test_a_signal_to_the_whole_process_group_raises_nothing_for_a_loaders_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They die of it as well; torch's handler would break off whatever the training thread does, such as leaving."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)  # a test before may have taken it off
    batches = iter(DataLoader(list(range(64)), num_workers=1))
    next(batches)
    of_torch, stopping = signal.getsignal(signal.SIGCHLD), Stopping()
    assert callable(of_torch)
    assert of_torch.__module__ == "torch.utils.data._utils.signal_handling"
    stopping.install()
    try:
        signal.raise_signal(signal.SIGTERM)
        (worker,) = batches._workers  # type: ignore[attr-defined]
        kill = f"import os; os.kill({worker.pid}, {signal.SIGTERM:d})"
        subprocess.run([sys.executable, "-c", kill], check=True)  # at its parent's it would end with 0
        ended = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # torch's handler is to see it as well
        time.sleep(0.01)  # it would run here at the latest
        assert ended is not None
        assert ended.si_status == signal.SIGTERM
        assert stopping.asked
    finally:
        stopping.restore()
        del batches
        signal.signal(signal.SIGCHLD, of_torch)


def test_a_state_is_written_where_the_start_of_its_thread_was_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error of a signal's handler: the thread begins all the same, while `close` does its work."""
    real, go = threading.Thread.start, threading.Event()

    def broken_off(thread: threading.Thread) -> None:
        _thread.start_new_thread(lambda: (go.wait(), real(thread)), ())
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    def job() -> None:
        go.set()
        until(lambda: writer._thread.ident is not None and not writer._thread.is_alive())
        written.append(1)

    written: list[int] = []
    writer = BackgroundThread("state")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", broken_off)
        writer.submit(job)
    closing = threading.Thread(target=lambda: written.append(writer.close(HANGING_S)), daemon=True)
    closing.start()
    closing.join(HANGING_S)
    assert written == [1, True]


def test_a_state_is_written_where_no_thread_can_be_begun_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on, as the program ends."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    written: list[int] = []
    writer = BackgroundThread("state")
    monkeypatch.setattr(threading.Thread, "start", refused)
    writer.submit(lambda: written.append(1))
    writer.submit(lambda: written.append(2))
    assert writer.close(1.0)
    assert written == [1, 2]


def test_a_proposal_that_a_checkpoint_took_the_place_of_is_made_anew(redis_server: str) -> None:
    """A learner without settings of its own is first, and proposes the defaults; then a syncer puts its run's there."""
    joined = list[int]()

    def learn() -> None:
        with Learner(nn.Linear(4, 4), run="proposed-anew", redis_url=redis_server) as learner:
            joined.append(learner.joined.training.spec.sync.sync_interval)

    learner = threading.Thread(target=learn)
    learner.start()
    proposed = wait_for(lambda: on_bus(redis_server, "proposed-anew", lambda bus: bus.read_spec()))
    spec = codec.decode(Spec, proposed)
    ours = spec.model_copy(update={"sync": spec.sync.model_copy(update={"sync_interval": 7})})
    assert on_bus(redis_server, "proposed-anew", lambda bus: bus.replace_spec(codec.encode(ours), proposed))
    with a_syncer(redis_server, "proposed-anew"):
        learner.join(HANGING_S)
    assert joined == [7]


@pytest.mark.parametrize("copies", ["snapshot", "overwrite"])
def test_a_loop_that_survives_a_lack_of_memory_in_a_step_goes_on_in_every_fragment(
    redis_server: str, monkeypatch: pytest.MonkeyPatch, copies: str
) -> None:
    """A copy fails once, of the second fragment: its delta is published at a later step, its global adopted then."""
    run, turns = f"survives-{copies}", SYNC.model_copy(update={"fragments": 2, "sync_interval": 2})
    failed = 0

    def fails_once(p: int, *values: Any) -> Any:
        nonlocal failed
        if p and not failed:
            failed += 1
            raise torch.OutOfMemoryError("no memory")
        return copied(p, *values)

    with a_syncer(redis_server, run), learner_of(redis_server, run, sync=turns) as learner:
        rounds, parameters = learner.joined.training.rounds, learner.joined.training.parameters
        copied = getattr(parameters, copies)
        monkeypatch.setattr(parameters, copies, fails_once)
        deadline = time.monotonic() + HANGING_S
        while not failed or min(rounds.versions) < 5:
            assert time.monotonic() < deadline, rounds.versions
            try:
                learner.step(1)
            except torch.OutOfMemoryError:
                before = rounds.versions
            time.sleep(0.01)
    assert failed
    assert max(before) < 5
