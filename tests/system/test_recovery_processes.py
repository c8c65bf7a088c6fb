"""A learner of a real run, killed and started again: where its moments come from."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.process.lifecycle import AGAIN_STATUS
from tests import HANGING_S

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("source", ["checkpoint", "peer"])
def test_a_killed_learner_comes_back_with_moments(tmp_path: Path, source: str) -> None:
    """From its own checkpoint, or, if that is not to be used, from the live peer; and it trains on from there."""
    recover = "auto" if source == "checkpoint" else "peer"
    arguments = ["--learners", "2", "--tokens", "300000", "--kill-learner", "1", "--kill-at", "0.4"]
    arguments += ["--restart-at", "0.45", "--recover", recover, "--config", str(tmp_path / "own.toml")]
    (tmp_path / "own.toml").write_text('state_every = "1s"\nlog_losses = true\neval_every = "60s"\n')
    command = [sys.executable, "-m", "diloco", "demo", *arguments, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "out/logs/learner-1.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert [one["source"] for one in events if one["event"] == "moments_recovered"] == [source]
    steps = (tmp_path / "out/learners/learner-1/losses.jsonl").read_text().splitlines()
    losses = [json.loads(line) for line in steps]
    assert len({one["incarnation"] for one in losses}) == 2
    before = [one["loss"] for one in losses if one["incarnation"] == losses[0]["incarnation"]]
    after = [one["loss"] for one in losses if one["incarnation"] == losses[-1]["incarnation"]]
    assert max(after[:5]) < sum(before[-20:]) / len(before[-20:]) + 0.5


@contextmanager
def party(url: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`diloco ARGUMENTS` in the background, logging to a file."""
    with log.open("ab") as output:
        command = [sys.executable, "-m", "diloco", *arguments]
        process = subprocess.Popen(command, env={**os.environ, "DILOCO_REDIS_URL": url}, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_steps(losses: Path, incarnations: int) -> None:
    """Until the learner has written losses of that many incarnations."""
    deadline = time.monotonic() + HANGING_S
    while not losses.is_file() or len({json.loads(x)["incarnation"] for x in _whole(losses)}) < incarnations:
        assert time.monotonic() < deadline, "the learner made no step"
        time.sleep(0.1)


def wait_for_merge(url: str) -> None:
    """Until some fragment is past version 0."""

    async def newest() -> int:
        bus = await connect(url, "run")
        try:
            return max((head.version for head in await bus.read_heads(range(8)) if head), default=0)
        finally:
            await bus.close()

    deadline = time.monotonic() + HANGING_S
    while asyncio.run(newest()) == 0:
        assert time.monotonic() < deadline, "nothing was merged"
        time.sleep(0.1)


def _whole(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.endswith("}")]


def test_a_learner_that_leaves_at_sigterm_saves_its_state_and_goes_on_from_it(tmp_path: Path) -> None:
    """No time for a regular saving was there: what it comes back with was saved as it left."""
    state, log = tmp_path / "state", tmp_path / "learner.log"
    learner = ["learner", "--tokens", "100000000", "--learner-id", "l0", "--state-dir", str(state)]
    learner += ["--config", str(tmp_path / "own.toml"), "--threads", "1", "--sync-interval", "4"]
    (tmp_path / "own.toml").write_text('state_every = "1h"\nlog_losses = true\n')
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedRedis()).url
        stack.enter_context(party(url, tmp_path / "syncer.log", "syncer", "--http-port", "0"))
        for incarnation in (1, 2):
            process = stack.enter_context(party(url, log, *learner))
            wait_for_steps(state / "losses.jsonl", incarnation)
            wait_for_merge(url)  # at version 0 nothing is recovered
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANGING_S) == AGAIN_STATUS
            saved = json.loads((state / "state.json").read_text())
            steps = len(_whole(state / "losses.jsonl"))
            assert saved["steps"] == steps > 0
    events = [json.loads(line) for line in _whole(log) if line.startswith("{")]
    assert [one["source"] for one in events if one["event"] == "moments_recovered"] == ["checkpoint"]
