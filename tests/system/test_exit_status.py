"""What the end of a process says to whoever starts it: a scheduler, or compose."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.process.lifecycle import AGAIN_STATUS
from tests import HANGING_S

pytestmark = [pytest.mark.slow]

SMALL = ["--model", "nano", "--seq-len", "64", "--batch", "4", "--fragments", "4", "--sync-interval", "6"]
BUDGET = 150_000
PARTIES = {
    "syncer": ["syncer", "--http-port", "0"],
    "one": ["learner", "--learner-id", "one", "--threads", "1", *SMALL],
    "set": ["learner", "--learner-id", "set", "--device", "cpu+cpu", "--threads", "1", *SMALL],
    "evaluator": ["evaluator", "--threads", "1"],
}


class Started:
    """All parties of a run as processes, each with its log."""

    def __init__(self, folder: Path, url: str, **more: str) -> None:
        self._logs = {name: folder / f"{name}.log" for name in PARTIES}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        environ = kept | {"DILOCO_REDIS_URL": url, "DILOCO_TOKENS": str(BUDGET), "DILOCO_EVAL_TOKENS": "2048"} | more
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, arguments in PARTIES.items():
            with self._logs[name].open("wb") as log:
                command = [sys.executable, "-m", "diloco", *arguments]
                self._processes[name] = subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def events(self, name: str) -> list[str]:
        """Names of what a party has logged."""
        lines = self._logs[name].read_text().splitlines()
        return [json.loads(line)["event"] for line in lines if line.startswith("{") and line.endswith("}")]

    def train(self) -> None:
        """Wait until both learners are in the run, something is merged, and the evaluator has measured."""
        until = time.monotonic() + HANGING_S
        wanted = {"syncer": "fragment_merged", "one": "training_started", "set": "training_started"}
        while not all(event in self.events(name) for name, event in (wanted | {"evaluator": "evaluated"}).items()):
            assert time.monotonic() < until, self.told()
            assert not self.statuses(), self.told()
            time.sleep(0.1)

    def signal(self) -> None:
        """SIGTERM to all."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)

    def statuses(self) -> dict[str, int]:
        """Of those that have ended."""
        polled = ((name, process.poll()) for name, process in self._processes.items())
        return {name: status for name, status in polled if status is not None}

    def ends(self) -> dict[str, int]:
        """Wait for all; their statuses."""
        until = time.monotonic() + HANGING_S
        while len(self.statuses()) < len(PARTIES):
            assert time.monotonic() < until, self.told()
            time.sleep(0.1)
        return self.statuses()

    def told(self) -> dict[str, str]:
        """The ends of the logs."""
        return {name: log.read_text()[-2000:] for name, log in self._logs.items()}

    def kill(self) -> None:
        """What is left."""
        for process in self._processes.values():
            process.kill()
            process.wait()


def test_a_stop_is_not_a_success_and_a_finished_run_is(tmp_path: Path) -> None:
    """SIGTERM in mid-run: a learner, one of two ranks, the evaluator and the syncer end with 75. Started again as they
    were, they go on with the run, and end with 0 once it is finished. Started once more they do so at once."""
    with EmbeddedRedis() as redis:
        for life, status in enumerate((AGAIN_STATUS, 0, 0)):
            (folder := tmp_path / str(life)).mkdir()
            parties = Started(folder, redis.url, DILOCO_PACE="0.5" if status else "0")
            try:
                if status:
                    parties.train()
                    parties.signal()
                assert parties.ends() == dict.fromkeys(PARTIES, status), parties.told()
            finally:
                parties.kill()


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_syncer_whose_streams_are_closed_ends_as_any_other(closed: str) -> None:
    """`diloco syncer >&-`: uvloop closes none of the first three descriptors, and ended by SIGABRT as it had to."""
    with EmbeddedRedis() as redis:
        shell = f'exec "$0" -m diloco syncer --http-port 0 {closed}'
        command = ["/bin/sh", "-c", shell, sys.executable]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        process = subprocess.Popen(command, env=kept | {"DILOCO_REDIS_URL": redis.url}, stdin=subprocess.DEVNULL)
        try:
            client, until = Redis.from_url(redis.url), time.monotonic() + HANGING_S
            while not any(one["cmd"] == "get" for one in client.client_list()):  # it waits for a spec, and for signals
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANGING_S) == AGAIN_STATUS
        finally:
            process.kill()
            process.wait()
