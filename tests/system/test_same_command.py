"""Everything is killed at random moments, Redis too, and the same lines are typed again: the run goes on to its end."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import BusError
from diloco.pipeline.messages.run import RunState
from diloco.syncer.checkpoints.loading import newest_of_run
from diloco.syncer.checkpoints.places import place_of
from tests import HANGING_S

pytestmark = [pytest.mark.slow]

TOKENS, LEARNERS, LIVES = 2_000_000, 2, 11
MODEL = ["--model", "nano", "--seq-len", "32", "--tokens", str(TOKENS)]


def state_of(url: str) -> RunState | None:
    async def read() -> RunState | None:
        async with open_bus(url, "run") as bus:
            return await bus.read_state()

    try:
        return asyncio.run(read())
    except BusError:
        return None


def saved(folder: Path) -> tuple[float, int]:
    """When the run in a folder began, and its tokens at its newest checkpoint; zeros: it has none."""
    found = newest_of_run(place_of(folder), "run")
    return (0.0, 0) if found is None else (found.state.began_unix_s, found.state.tokens)


def until(reached: Any, *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HANGING_S
    while not reached():
        assert time.monotonic() < deadline
        assert not any(one.poll() not in (None, 0) for one in processes), [one.args for one in processes if one.poll()]
        time.sleep(0.2)


def test_parties_of_their_own(tmp_path: Path, popen: Any) -> None:
    """One line for the syncer, one for each learner, and a Redis that keeps nothing."""
    moments, folder = random.Random(7), tmp_path / "checkpoints"
    for life in range(LIVES):
        began, had = saved(folder)
        with EmbeddedRedis() as server, (tmp_path / f"{life}.log").open("wb") as log:
            env = {**os.environ, "DILOCO_REDIS_URL": server.url}

            def start(*line: str, env: Any = env, log: Any = log) -> subprocess.Popen[bytes]:
                command = [sys.executable, "-m", "diloco", *line]
                process: subprocess.Popen[bytes] = popen(command, env=env, stdout=log, stderr=log)
                return process

            every = ["--checkpoint-dir", str(folder), "--checkpoint-every", "2s", "--http-port", "0"]
            syncer = start("syncer", *every)
            names = [f"l{i}" for i in range(LEARNERS)]
            moments.shuffle(names)
            party = [
                start("learner", *MODEL, "--threads", "1", "--learner-id", name, "--state-dir", str(tmp_path / name))
                for name in names
            ]
            if life == LIVES - 1:
                assert syncer.wait(HANGING_S) == 0
                assert [one.wait(HANGING_S) for one in party] == [0] * LEARNERS
                continue
            until(lambda url=server.url, had=had: (now := state_of(url)) and now.tokens > had, syncer, *party)
            time.sleep(moments.uniform(0.0, 6.0))
            now = state_of(server.url)
            for one in (syncer, *party):
                one.send_signal(signal.SIGKILL)
                one.wait()
        assert now is not None
        assert now.base_tokens == had
        assert began in (0.0, now.began_unix_s), "it goes on in the same run, once it has a checkpoint"
    _, tokens = saved(folder)
    assert tokens >= TOKENS
    assert had > 0


def test_a_whole_run(tmp_path: Path, popen: Any) -> None:
    """`diloco run --out X`: killed with all its processes, and stopped once by Ctrl-C; then it is done, with 0."""
    out = tmp_path / "out"
    line = [sys.executable, "-m", "diloco", "run", "--out", str(out), "--learners", "2", *MODEL]
    line += ["--checkpoint-every", "2s", "--http-port", "0"]
    for ending in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        had = saved(out / "checkpoints")[1]
        with (tmp_path / "out.log").open("ab") as log:
            process = popen(line, stdout=log, stderr=log, start_new_session=True)
            until(lambda had=had: saved(out / "checkpoints")[1] > had, process)
            if ending is signal.SIGINT:
                process.send_signal(ending)
                assert process.wait(HANGING_S) == 0
            else:
                os.killpg(process.pid, ending)
                process.wait()
    for _ in range(2):
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=HANGING_S)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "is finished, with" in done.stdout
    report = json.loads((out / "report.json").read_text())
    lost = report["resumed_from"]["not_merged_tokens"] + sum(report["tokens_lost"].values())
    assert report["tokens"] == report["merged_tokens"] + lost >= TOKENS
    assert (out / "report-1.json").is_file()
