"""`diloco status --watch`: again and again, through an outage, until Ctrl-C or the run's end."""

import asyncio
import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from diloco import status as status_command
from diloco.cli import load_command, main
from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.payload.codec import encode
from tests import HANGING_S, samples
from tests.parties import environment

pytestmark = pytest.mark.redis


async def begin(url: str, run: str, state: RunState) -> None:
    async with open_bus(url, run) as bus:
        await bus.propose_spec(encode(samples.spec()))
        await bus.write_report(samples.report("anna"))
        await bus.write_state(state)


@contextmanager
def watching(url: str, run: str, *more: str, out: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "diloco", "status", "--run", run, "--watch", "1", *more]
    env = environment(DILOCO_REDIS_URL=url, PYTHONUNBUFFERED="1")
    with subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def test_it_goes_through_an_outage_and_ends_cleanly_at_ctrl_c(redis_binary: object) -> None:
    """A line of JSON each second. While Redis is away it says so; Ctrl-C is status 0 and no traceback."""
    with EmbeddedRedis(appendonly=True) as server:
        asyncio.run(begin(server.url, "away", samples.run_state(tokens=700)))
        with watching(server.url, "away", "--json") as process:
            assert process.stdout is not None
            assert process.stderr is not None
            for _ in range(2):
                assert json.loads(process.stdout.readline())["tokens"] == 1000
            server.kill()
            assert "Redis is not answering" in process.stderr.readline()
            server.start()
            assert json.loads(process.stdout.readline())["run"] == "away"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=HANGING_S)
            assert process.returncode == 0
            assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("given", "folder", "every_s"),
    [
        (["--watch"], None, 2),
        (["--watch", "5"], None, 5),
        (["--watch", "--json"], None, 2),
        (["--watch", "runs/2026"], "runs/2026", 2),
        (["..", "--watch"], "..", 2),
        (["--watch=3", "x"], "x", 3),
        ([], None, None),
    ],
)
def test_without_a_number_it_is_every_two_seconds(given: list[str], folder: str | None, every_s: int | None) -> None:
    """What follows may be the folder."""
    asked = get_command(load_command("status")).make_context("diloco status", list(given)).params
    assert (asked["folder"], asked["as_json"], asked["every_s"]) == (
        folder and Path(folder),
        "--json" in given,
        every_s,
    )


def test_a_number_of_seconds_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("0", "-1", "2s", "0.5"):
        assert main(["status", "--watch", given]) == 2
        assert "--watch" in capsys.readouterr().err


def test_it_ends_with_the_run(redis_server: str) -> None:
    """Whoever looks need not be told to stop."""
    asyncio.run(begin(redis_server, "over", samples.run_state(phase=Phase.FINISHED, tokens=900)))
    with watching(redis_server, "over", "--json") as process:
        output, _ = process.communicate(timeout=HANGING_S)
    assert process.returncode == 0
    assert [json.loads(line)["phase"] for line in output.splitlines()] == ["finished"]


def test_it_ends_with_the_loss_of_the_last_model(
    redis_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If there is an evaluator, which measures it some seconds after the end."""
    asyncio.run(begin(redis_server, "last", samples.run_state(phase=Phase.FINISHED, tokens=900)))

    def measure(loss: float, final: bool) -> None:
        async def add() -> None:
            async with open_bus(redis_server, "last") as bus:
                await bus.add_evaluation(samples.evaluation(loss=loss, tokens=900, final=final))

        asyncio.run(add())

    measure(3.0, final=False)
    monkeypatch.setattr(status_command, "MEASURED_WITHIN_S", HANGING_S)
    monkeypatch.setattr(status_command.time, "sleep", lambda s: measure(2.0, final=True))
    assert main(["status", "--redis-url", redis_server, "--run", "last", "--watch", "1", "--json"]) == 0
    seen = [json.loads(line)["evaluation"]["loss"] for line in capsys.readouterr().out.splitlines()]
    assert seen == [3.0, 2.0]


def test_a_price_is_shown_as_cost(redis_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a learner that trained for 10 s; without a price there is nothing of it."""
    asyncio.run(begin(redis_server, "paid", samples.run_state(phase=Phase.FINISHED, started_unix_s=time.time() - 60)))
    ask = ["status", "--redis-url", redis_server, "--run", "paid"]
    assert main([*ask, "--json", "--price", "360"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput"]["since_start"]["seconds"]["training"] == pytest.approx(10, abs=0.1)
    assert found["cost"]["total"] == pytest.approx(1, abs=0.01)
    assert main([*ask, "--price", "360"]) == 0
    assert "cost       1.00" in capsys.readouterr().out
    assert main(ask) == 0
    assert "cost " not in capsys.readouterr().out
    assert main([*ask, "--price", "-1"]) == 2


def test_in_a_terminal_it_is_drawn_in_place(redis_server: str) -> None:
    """The second one over the first, and the cursor comes back at the end."""
    asyncio.run(begin(redis_server, "drawn", samples.run_state(tokens=700)))
    master, slave = pty.openpty()
    with watching(redis_server, "drawn", out=slave) as process:
        os.close(slave)
        seen = b""
        while seen.count(b"anna") < 3:
            seen += os.read(master, 65536)
        process.send_signal(signal.SIGINT)
        while b"\x1b[?25h" not in seen:
            seen += os.read(master, 65536)
        process.wait(HANGING_S)
    os.close(master)
    assert process.returncode == 0
    assert b"\x1b[1A" in seen or b"\x1b[A" in seen, "lines up, to draw over what was there"


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_who_waits_for_redis_is_told_so(
    wait_s: float, redis_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a failover: a command that only stands there looks broken. Nobody could write until then either."""
    read, asked = status_command.read_status, list[float]()

    async def noted(*given: Any, answers_s: float) -> Any:
        asked.append(answers_s)
        return await read(*given, answers_s=answers_s)

    @asynccontextmanager
    async def late(url: str, run: str) -> AsyncIterator[Any]:
        await asyncio.sleep(wait_s)
        async with open_bus(url, run) as bus:
            yield bus

    monkeypatch.setattr(status_command, "SOON_S", 0.2 if wait_s else HANGING_S)
    monkeypatch.setattr(status_command, "open_bus", late)
    monkeypatch.setattr(status_command, "read_status", noted)
    asyncio.run(begin(redis_server, "late", samples.run_state(tokens=700)))
    assert main(["status", "--run", "late", "--redis-url", redis_server]) == 0
    assert ("waiting for Redis, which has not answered yet" in capsys.readouterr().err) is bool(wait_s)
    assert asked == [0.0 if wait_s else math.inf]
