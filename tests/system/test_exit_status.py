"""What the end of a process says to whoever starts it: a scheduler, or compose."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.process.signals import AGAIN_STATUS
from tests import HANGING_S
from tests.parties import Parties, environment, wait_for

pytestmark = [pytest.mark.slow]

SMALL = ["--model", "nano", "--seq-len", "64", "--batch", "4", "--fragments", "4", "--sync-interval", "6"]
PARTIES = {
    "syncer": ["syncer", "--http-port", "0"],
    "one": ["learner", "--learner-id", "one", "--threads", "1", *SMALL],
    "set": ["learner", "--learner-id", "set", "--device", "cpu+cpu", "--threads", "1", *SMALL],
    "evaluator": ["evaluator", "--threads", "1"],
}


WORKS = {"syncer": "fragment_merged", "one": "training_started", "set": "training_started", "evaluator": "evaluated"}
"""What each logs once it is at work."""


def test_a_stop_is_not_a_success_and_a_finished_run_is(tmp_path: Path) -> None:
    """SIGTERM in mid-run: a learner, one of two ranks, the evaluator and the syncer end with 75. Started again as they
    were, they go on with the run, and end with 0 once it is finished. Started once more they do so at once."""
    with Parties(tmp_path, tokens=150_000, eval_tokens=2048) as here:
        for life, status in enumerate((AGAIN_STATUS, 0, 0)):
            pace = {"DILOCO_PACE": "0.5" if status else "0"}
            processes = [here.diloco(f"{name}-{life}", *given, env=pace) for name, given in PARTIES.items()]
            if status:

                def at_work() -> bool:
                    assert all(process.poll() is None for process in processes), here.shown()  # noqa: B023
                    logged = {name: [one["event"] for one in here.events(f"{name}-0")] for name in PARTIES}
                    return all(event in logged[name] for name, event in WORKS.items())

                here.until(at_work)
                for process in processes:
                    process.send_signal(signal.SIGTERM)
            assert here.ends(*processes) == [status] * len(PARTIES), here.shown()


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_syncer_whose_streams_are_closed_ends_as_any_other(closed: str, popen: Any) -> None:
    """`diloco syncer >&-`: uvloop closes none of the first three descriptors, and ended by SIGABRT as it had to."""
    with EmbeddedRedis() as redis:
        shell = f'exec "$0" -m diloco syncer --http-port 0 {closed}'
        process = popen(["/bin/sh", "-c", shell, sys.executable], env=environment(DILOCO_REDIS_URL=redis.url))
        with Redis.from_url(redis.url) as client:  # it waits for a spec, and for signals
            wait_for(lambda: process.poll() is not None or any(one["cmd"] == "get" for one in client.client_list()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGING_S) == AGAIN_STATUS
