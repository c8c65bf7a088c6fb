import asyncio
import io
import json
import os
import signal
import time
from functools import partial

import pytest
import structlog

from diloco.pipeline.process import logs, signals
from tests import HANGING_S
from tests.parties import python


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore():
    yield
    structlog.reset_defaults()


def test_a_file_gets_one_json_object_a_line():
    stream = io.StringIO()
    logs.configure("info", stream)
    log = structlog.get_logger().bind(learner="a")
    log.info("delta_published", tokens=12)
    log.debug("hidden")
    [line] = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record["event"] == "delta_published"
    assert (record["learner"], record["tokens"], record["level"]) == ("a", 12, "info")
    assert record["timestamp"].endswith("Z")


def test_an_outage_is_said_once_in_ten_seconds_in_each_of_its_wordings(monkeypatch: pytest.MonkeyPatch):
    """However many works of a party meet with it."""
    stream = io.StringIO()
    logs.configure("info", stream)
    log = structlog.get_logger().bind(learner="a")
    for now_s in (0.0, 0.1, 9.9, 10.1):
        monkeypatch.setattr(time, "monotonic", partial(float, now_s))
        for task in ("follow", "upload"):
            log.warning("bus_unavailable", error="no answer", task=task)
        log.warning("bus_full", error="too few replicas are connected")
        log.info("fragment_pulled")
    told = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert told == ["bus_unavailable", "bus_full", *["fragment_pulled"] * 3, *told[:2], "fragment_pulled"]


def test_an_exception_stays_on_its_json_line():
    stream = io.StringIO()
    logs.configure("info", stream)
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        structlog.get_logger().exception("merge_failed")
    [line] = stream.getvalue().splitlines()
    assert "ZeroDivisionError" in json.loads(line)["exception"]


def test_a_terminal_gets_text_for_people():
    stream = Terminal()
    logs.configure("debug", stream)
    structlog.get_logger().debug("quorum_reached", members=3)
    assert "quorum_reached" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


async def test_a_hangup_asks_for_the_end_and_is_never_the_second_signal():
    """A closed terminal sends it twice, and a session manager SIGTERM with it: none of that ends a process at once."""
    event, second = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signals.install_signal_handlers(loop, event, second.set)
    try:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(event.wait(), HANGING_S)
            await asyncio.sleep(0.01)
        assert not second.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(second.wait(), HANGING_S)
    finally:
        for number in signals.end_signals():
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)


async def test_an_ignored_hangup_stays_ignored():
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in signals.end_signals()
        event = asyncio.Event()
        signals.install_signal_handlers(asyncio.get_running_loop(), event)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
        assert not event.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number in signals.end_signals():
            asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_ends_a_process_that_is_still_cleaning_up():
    program = """
import asyncio, os, signal
from diloco.pipeline.process.signals import stop_event
async def main():
    stop = stop_event()
    os.kill(os.getpid(), signal.SIGINT)
    await stop.wait()
    print("cleaning up", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    done = python("-c", program)
    assert done.stdout.strip() == "cleaning up"
    assert done.returncode == 1
    assert "second signal" in done.stderr
