"""`diloco watch --to tensorboard` beside a real run: its files hold what the run says, and a kill of it is its own."""

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest

from diloco.pipeline.bus.ports import START
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.messages.run import Evaluation
from diloco.pipeline.view.status import Status
from diloco.pipeline.view.status_reader import read_status
from tests.diloco.test_track import QUICK, of_tensorboard
from tests.parties import Parties

pytestmark = [pytest.mark.slow]
SMALL = ("--fragments", "4", "--sync-interval", "6", "--seq-len", "64", "--batch", "4", "--tokens", "120k")


def read(url: str) -> tuple[Status, list[Evaluation]]:
    """What the run says of itself."""

    async def ask() -> tuple[Status, list[Evaluation]]:
        async with open_bus(url, "run") as bus:
            found = await bus.read_evaluations(START)
            return await read_status(bus, LoopClock()), [one for _, one in found]

    return asyncio.run(ask())


def test_curves_are_those_of_the_run_and_learners_do_not_notice_a_killed_watcher(tmp_path: Path) -> None:
    """One watcher is killed in mid-run. A later one tells of the time between too, and ends with the run. Each loss and
    each round is there once. Learners go on in their first lives to the end."""
    curves = tmp_path / "curves"
    with Parties(tmp_path, eval_tokens=2048, eval_every="1s") as here:

        def watcher() -> subprocess.Popen[bytes]:
            given = ("watch", "--run", "run", "--redis-url", here.url, "--to", "tensorboard", "--into", curves)
            return here.start("watcher", "-c", QUICK, "no_such", *given)

        first = watcher()  # before the run
        parties = [here.syncer()]
        for name in ("l0", "l1"):
            given = ("learner", "--pace", "150ms", "--model", "nano", "--threads", "1", "--learner-id", name, *SMALL)
            parties.append(here.diloco(name, *given))
        parties.append(here.diloco("evaluator", "evaluator", "--threads", "1"))

        here.until(lambda: len(of_tensorboard(curves).get("global/loss", [])) >= 2)
        first.send_signal(signal.SIGKILL)
        first.wait()
        before, trained = of_tensorboard(curves), read(here.url)[0]["tokens"]
        assert trained < 100_000, "it was killed in mid-run"
        here.until(lambda: read(here.url)[0]["tokens"] > trained + 10_000)
        assert here.ends(*parties, watcher()) == [0] * 5, here.shown()

        found, (status, evaluations) = of_tensorboard(curves), read(here.url)

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
        said = here.said(name)
        assert '"level": "warning"' not in said
        assert "Traceback" not in said
