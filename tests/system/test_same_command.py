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

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import BusError
from diloco.pipeline.messages.run import RunState
from diloco.syncer.checkpoints.loading import newest_of_run
from diloco.syncer.checkpoints.places import place_of
from tests import HANGING_S
from tests.parties import Parties, environment, wait_for

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


def well(*processes: subprocess.Popen[bytes]) -> bool:
    assert not any(one.poll() not in (None, 0) for one in processes), [one.args for one in processes if one.poll()]
    return True


def test_parties_of_their_own(tmp_path: Path) -> None:
    """One line for the syncer, one for each learner, and a Redis that keeps nothing."""
    moments, folder = random.Random(7), tmp_path / "checkpoints"
    for life in range(LIVES):
        began, had = saved(folder)
        (tmp_path / str(life)).mkdir()
        with Parties(tmp_path / str(life)) as here:
            syncer = here.syncer("--checkpoint-dir", folder, "--checkpoint-every", "2s")
            names = [f"l{i}" for i in range(LEARNERS)]
            moments.shuffle(names)
            given = ("learner", *MODEL, "--threads", "1")
            party = [here.diloco(one, *given, "--learner-id", one, "--state-dir", tmp_path / one) for one in names]
            if life == LIVES - 1:
                assert here.ends(syncer, *party) == [0] * (1 + LEARNERS)
                continue
            here.until(lambda: well(syncer, *party) and (now := state_of(here.url)) and now.tokens > had)  # noqa: B023
            time.sleep(moments.uniform(0.0, 6.0))
            now = state_of(here.url)
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
            process = popen(line, env=environment(), stdout=log, stderr=log, start_new_session=True)
            wait_for(lambda: well(process) and saved(out / "checkpoints")[1] > had)  # noqa: B023
            if ending is signal.SIGINT:
                process.send_signal(ending)
                assert process.wait(HANGING_S) == 0
            else:
                os.killpg(process.pid, ending)
                process.wait()
    for _ in range(2):
        done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False, timeout=HANGING_S)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "is finished, with" in done.stdout
    report = json.loads((out / "report.json").read_text())
    lost = report["resumed_from"]["not_merged_tokens"] + sum(report["tokens_lost"].values())
    assert report["tokens"] == report["merged_tokens"] + lost >= TOKENS
    assert (out / "report-1.json").is_file()
