"""A learner of a real run, killed and started again: where its moments come from."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.process.signals import AGAIN_STATUS
from tests.parties import Parties

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


async def newest(url: str) -> int:
    """Version of the fragment that is furthest on."""
    async with open_bus(url, "run") as bus:
        return max((head.version for head in await bus.read_heads(range(8)) if head), default=0)


def lives_in(losses: Path) -> list[str]:
    """The incarnation of each step that a learner has written the loss of."""
    lines = losses.read_text().splitlines() if losses.exists() else []
    return [json.loads(line)["incarnation"] for line in lines if line.endswith("}")]


def test_a_learner_that_leaves_at_sigterm_saves_its_state_and_goes_on_from_it(tmp_path: Path) -> None:
    """No time for a regular saving was there: what it comes back with was saved as it left."""
    state = tmp_path / "state"
    learner = ["learner", "--tokens", "100000000", "--learner-id", "l0", "--state-dir", str(state)]
    learner += ["--config", str(tmp_path / "own.toml"), "--threads", "1", "--sync-interval", "4"]
    (tmp_path / "own.toml").write_text('state_every = "1h"\nlog_losses = true\n')
    with Parties(tmp_path) as here:
        here.syncer()
        for life in (1, 2):
            process = here.diloco("learner", *learner)
            here.until(lambda life=life: len({*lives_in(state / "losses.jsonl")}) == life)
            here.until(lambda: asyncio.run(newest(here.url)))  # at version 0 nothing is recovered
            process.send_signal(signal.SIGTERM)
            assert here.ends(process) == [AGAIN_STATUS]
            saved = json.loads((state / "state.json").read_text())
            assert saved["steps"] == len(lives_in(state / "losses.jsonl")) > 0
        recovered = [one["source"] for one in here.events("learner") if one["event"] == "moments_recovered"]
    assert recovered == ["checkpoint"]
