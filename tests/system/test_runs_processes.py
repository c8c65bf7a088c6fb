"""A run as a thing: finished from elsewhere, extended under its name, freed. Real Redis, syncer and learners."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import HANGING_S
from tests.parties import Parties, environment, wait_for

pytestmark = [pytest.mark.slow]

LEARNER = ("learner", "--model", "nano", "--threads", "1")
SMALL = ("--fragments", "4", "--sync-interval", "6", "--seq-len", "64", "--batch", "4")


class Operator:
    """Whoever looks after the runs of a Redis."""

    def __init__(self, url: str) -> None:
        self.url = url

    def asks(self, *arguments: str) -> str:
        command, env = [sys.executable, "-m", "diloco", *arguments], environment(DILOCO_REDIS_URL=self.url)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HANGING_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sees(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The run's status, as soon as it is so."""
        wait_for(lambda: any(map(condition, json.loads(self.asks("runs", "--json")))))
        status: dict[str, Any] = json.loads(self.asks("status", "--json"))
        return status


def test_a_run_is_finished_from_elsewhere_extended_under_its_name_and_freed(tmp_path: Path) -> None:
    """The second part begins with the first one's globals, and every token of both is accounted for."""
    with Parties(tmp_path) as here:
        operator = Operator(here.url)

        def start(part: int, *more: str) -> list[subprocess.Popen[bytes]]:
            names = ("l0", "l1")
            learners = [here.diloco(f"{name}-{part}", *LEARNER, *more, "--learner-id", name) for name in names]
            return [here.syncer(name=f"syncer-{part}"), *learners]

        parties = start(1, *SMALL, "--tokens", "100M")
        operator.sees(lambda row: row["phase"] == "running" and row["tokens"] > 20_000)
        assert "finished: " in operator.asks("finish")
        assert here.ends(*parties) == [0, 0, 0]
        first = operator.sees(lambda row: row["phase"] == "finished")

        operator.asks("runs", "extend", "run", "--tokens", str(first["tokens"] + 30_000))
        assert here.ends(*start(2)) == [0, 0, 0]
        second = operator.sees(lambda row: row["phase"] == "finished")
        assert second["tokens"] >= first["tokens"] + 30_000
        for before, after in zip(first["fragments"], second["fragments"], strict=True):
            assert after["version"] > before["version"] > 0
            assert after["merged_tokens"] > before["merged_tokens"]
        assert second["tokens"] == second["merged_tokens"] + sum(second["tokens_lost"].values())
        assert second["merged_share"]["since_start"] > 0.5
        assert '"event": "spec_agreed"' in here.said("syncer-2")

        assert "deleted run 'run', finished" in operator.asks("runs", "delete", "run", "--yes")
        assert json.loads(operator.asks("runs", "--json")) == []
