"""`diloco watch --to tensorboard` beside a real run: its files hold what the run says, and a kill of it is its own."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.ports import START
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.messages.run import Evaluation
from diloco.pipeline.view.status import Status
from diloco.pipeline.view.status_reader import read_status
from tests import HANGING_S
from tests.diloco.test_track import QUICK, of_tensorboard
from tests.system.test_recovery_processes import party

pytestmark = [pytest.mark.slow]
SMALL = ("--fragments", "4", "--sync-interval", "6", "--seq-len", "64", "--batch", "4", "--tokens", "120k")


def read(url: str) -> tuple[Status, list[Evaluation]]:
    """What the run says of itself."""

    async def ask() -> tuple[Status, list[Evaluation]]:
        async with open_bus(url, "run") as bus:
            found = await bus.read_evaluations(START)
            return await read_status(bus, LoopClock()), [one for _, one in found]

    return asyncio.run(ask())


def test_curves_are_those_of_the_run_and_learners_do_not_notice_a_killed_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One watcher is killed in mid-run. A later one tells of the time between too, and ends with the run. Each loss and
    each round is there once. Learners go on in their first lives to the end."""
    monkeypatch.setenv("DILOCO_EVAL_TOKENS", "2048")
    monkeypatch.setenv("DILOCO_EVAL_EVERY", "1s")
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedRedis()).url
        curves = tmp_path / "curves"

        def watcher() -> subprocess.Popen[bytes]:
            given = ["watch", "--run", "run", "--redis-url", url, "--to", "tensorboard", "--into", str(curves)]
            log = stack.enter_context((tmp_path / "watcher.log").open("ab"))
            process = subprocess.Popen([sys.executable, "-c", QUICK, "no_such", *given], stdout=log, stderr=log)
            stack.callback(process.kill)
            return process

        def until(true: Callable[[], object]) -> None:
            end = time.monotonic() + HANGING_S
            while not true():
                assert time.monotonic() < end, (tmp_path / "watcher.log").read_text()
                time.sleep(0.3)

        first = watcher()  # before the run
        syncer = party(url, tmp_path / "syncer.log", "syncer", "--http-port", "0")
        parties = [stack.enter_context(syncer)]
        for name in ("l0", "l1"):
            given = ("learner", "--pace", "150ms", "--model", "nano", "--threads", "1", "--learner-id", name, *SMALL)
            parties.append(stack.enter_context(party(url, tmp_path / f"{name}.log", *given)))
        parties.append(stack.enter_context(party(url, tmp_path / "evaluator.log", "evaluator", "--threads", "1")))

        until(lambda: len(of_tensorboard(curves).get("global/loss", [])) >= 2)
        first.send_signal(signal.SIGKILL)
        first.wait()
        before, trained = of_tensorboard(curves), read(url)[0]["tokens"]
        assert trained < 100_000, "it was killed in mid-run"
        until(lambda: read(url)[0]["tokens"] > trained + 10_000)
        second = watcher()
        assert [one.wait(HANGING_S) for one in parties] == [0] * 4
        assert second.wait(HANGING_S) == 0, (tmp_path / "watcher.log").read_text()

        found, (status, evaluations) = of_tensorboard(curves), read(url)

    assert evaluations[-1].final
    losses = [(one.tokens, pytest.approx(one.loss, rel=1e-6)) for one in evaluations]
    assert found["global/loss"] == losses
    assert found["global/loss"][: len(before["global/loss"])] == before["global/loss"]
    rounds = min(one["version"] for one in status["fragments"])
    assert rounds > 4
    assert [step for step, _ in found["merges/merged_tokens"]] == list(range(1, rounds + 1))
    lost = status["tokens_lost"]
    for fate, tokens in {"merged": status["merged_tokens"], "died": lost["died"], "pending": 0}.items():
        assert found[f"tokens/{fate}"][-1] == (status["tokens"], pytest.approx(tokens, rel=1e-6))
    for name in ("l0", "l1"):
        for curve in ("loss", "steps_per_s", "staleness"):
            assert len(found[f"{curve}/{name}"]) > 1
    steps = [step for step, _ in found["tokens/merged"]]
    assert steps == sorted(set(steps)), "no look twice"
    assert len(status["learners"]) == 2, "an incarnation each"
    for name in ("l0", "l1"):
        said = (tmp_path / f"{name}.log").read_text()
        assert '"level": "warning"' not in said
        assert "Traceback" not in said
