"""A run as a thing: finished from elsewhere, extended under its name, freed. Real Redis, syncer and learners."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.embedded import EmbeddedRedis
from tests import HANGING_S
from tests.system.test_recovery_processes import party

pytestmark = [pytest.mark.slow]

LEARNER = ("learner", "--model", "nano", "--threads", "1")
SMALL = ("--fragments", "4", "--sync-interval", "6", "--seq-len", "64", "--batch", "4")


class Operator:
    """Whoever looks after the runs of a Redis."""

    def __init__(self, url: str) -> None:
        self.url = url

    def asks(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "diloco", *arguments, "--redis-url", self.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGING_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sees(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The run's status, as soon as it is so."""
        deadline = time.monotonic() + HANGING_S
        while time.monotonic() < deadline:
            found = [row for row in json.loads(self.asks("runs", "--json")) if row["run"] == "run"]
            if found and condition(found[0]):
                status: dict[str, Any] = json.loads(self.asks("status", "--json"))
                return status
            time.sleep(0.2)
        raise AssertionError("it did not happen in time")


def test_a_run_is_finished_from_elsewhere_extended_under_its_name_and_freed(tmp_path: Path) -> None:
    """The second part begins with the first one's globals, and every token of both is accounted for."""
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedRedis()).url
        operator = Operator(url)

        def start(part: int, *more: str) -> list[subprocess.Popen[bytes]]:
            syncer = party(url, tmp_path / f"syncer-{part}.log", "syncer", "--http-port", "0")
            learners = (
                party(url, tmp_path / f"l{i}-{part}.log", *LEARNER, *more, "--learner-id", f"l{i}") for i in (0, 1)
            )
            return [stack.enter_context(one) for one in (syncer, *learners)]

        parties = start(1, *SMALL, "--tokens", "100M")
        operator.sees(lambda row: row["phase"] == "running" and row["tokens"] > 20_000)
        assert "finished: " in operator.asks("finish")
        assert [one.wait(HANGING_S) for one in parties] == [0, 0, 0]
        first = operator.sees(lambda row: row["phase"] == "finished")

        operator.asks("runs", "extend", "run", "--tokens", str(first["tokens"] + 30_000))
        parties = start(2)
        assert [one.wait(HANGING_S) for one in parties] == [0, 0, 0]
        second = operator.sees(lambda row: row["phase"] == "finished")
        assert second["tokens"] >= first["tokens"] + 30_000
        for before, after in zip(first["fragments"], second["fragments"], strict=True):
            assert after["version"] > before["version"] > 0
            assert after["merged_tokens"] > before["merged_tokens"]
        assert second["tokens"] == second["merged_tokens"] + sum(second["tokens_lost"].values())
        assert second["merged_share"]["since_start"] > 0.5
        assert '"event": "spec_agreed"' in (tmp_path / "syncer-2.log").read_text()

        assert "deleted run 'run', finished" in operator.asks("runs", "delete", "run", "--yes")
        assert json.loads(operator.asks("runs", "--json")) == []
