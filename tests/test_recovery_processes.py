"""A learner of a real run, killed and started again: where its moments come from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("source", ["checkpoint", "peer"])
def test_a_killed_learner_comes_back_with_moments(tmp_path: Path, source: str) -> None:
    """From its own checkpoint, or, if that is not to be used, from the live peer; and it trains on from there."""
    recover = "auto" if source == "checkpoint" else "peer"
    arguments = ["--learners", "2", "--tokens", "300000", "--kill-learner", "1", "--kill-at", "0.4"]
    arguments += ["--restart-at", "0.45", "--state-every", "1s", "--log-losses", "--recover", recover]
    command = [sys.executable, "-m", "diloco", "run", *arguments, "--eval-every", "60s", "--out", str(tmp_path / "out")]
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
