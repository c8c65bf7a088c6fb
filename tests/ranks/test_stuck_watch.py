"""What watches whether the main thread comes back after a signal, in this process: what it touches, and what not."""

import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from diloco.workers.ranks import stuck
from diloco.workers.ranks.stuck import PROBE, RankStopping
from diloco.workers.stopping import STOPS
from tests import HANGING_S

INTERRUPTS = (signal.SIGINT, signal.SIGURG, *STOPS)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """As a program finds them that has no handlers of its own."""
    before = {number: signal.getsignal(number) for number in INTERRUPTS}
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankStopping, list[Any]]]:
    """One that gives half a second, and how it would have ended this process."""
    for name in "BACK_S", "AGAIN_S":
        monkeypatch.setattr(stuck, name, 0.5)
    monkeypatch.setattr(stuck, "LOOK_S", 0.02)
    stopping, ended = RankStopping(), list[Any]()
    monkeypatch.setattr(stopping, "_end", lambda *how: ended.append(how))
    yield stopping, ended
    stopping.restore()


def hash_for(count: int) -> float:
    """How long it takes."""
    began = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", count)
    return time.monotonic() - began


def inside(long_s: float = 1.5) -> None:
    """One call that lets other threads run and does not look for signals, as torch's collectives."""
    assert hash_for(round(long_s * 10**6 / hash_for(10**6))) > long_s / 2


def later(number: int) -> None:
    threading.Timer(0.8, os.kill, (os.getpid(), number)).start()


def test_who_comes_back_is_not_ended_and_who_does_not_is(watched: tuple[RankStopping, list[Any]]) -> None:
    """Also by a signal that was noted while it was there: it is to leave its loop."""
    stopping, ended = watched
    stopping.install()
    os.kill(os.getpid(), signal.SIGTERM)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        time.sleep(0.2)  # goes on after each signal
    assert (stopping.heard, ended) == (signal.SIGTERM, [])
    inside()
    assert ended
    assert set(ended) == {(signal.SIGTERM, False)}


def test_a_learner_that_another_thread_has_closed_ends_nobody(watched: tuple[RankStopping, list[Any]]) -> None:
    """Though a signal came before: nothing is left to be ended, and the process may go on for ever."""
    stopping, ended = watched
    stopping.install()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    closing = threading.Thread(target=stopping.restore)
    closing.start()
    closing.join()
    time.sleep(1.5)
    assert (stopping.heard, ended) == (signal.SIGTERM, [])


def test_a_second_signal_hurries_who_is_away_also_after_it_was_there(watched: tuple[RankStopping, list[Any]]) -> None:
    """It came back after the first one, and is inside torch as the second one comes."""
    stopping, ended = watched
    stopping.install()
    os.kill(os.getpid(), signal.SIGTERM)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        time.sleep(0.05)
    later(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        inside(3)
    assert ended[-1] == (signal.SIGTERM, True)


def test_who_came_back_after_a_second_signal_is_given_all_the_time_again(
    watched: tuple[RankStopping, list[Any]],
) -> None:
    """If it goes away again it is not said that the last signal came 2 s ago."""
    stopping, ended = watched
    stopping.install()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    time.sleep(0.1)
    inside()
    assert set(ended) == {(signal.SIGTERM, False)}


def test_a_watch_whose_other_end_is_closed_is_over() -> None:
    """It reads nothing more: it does not take a core."""
    reader, writer = socket.socketpair()
    with reader:
        writer.close()
        assert RankStopping()._read(reader, 0.2) is None


def test_ctrl_c_that_was_raised_is_the_loops_affair(watched: tuple[RankStopping, list[Any]]) -> None:
    """A loop may catch it and go on, with steps of any length."""
    stopping, ended = watched
    stopping.install()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    time.sleep(0.3)
    inside()
    assert not ended


def test_a_programs_own_handlers_are_left_to_it(watched: tuple[RankStopping, list[Any]]) -> None:
    """A rank inside torch is not ended for a signal that its program takes itself."""
    stopping, ended = watched
    own: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: own.append(number))
    stopping.install()
    later(signal.SIGTERM)
    inside(3)
    assert (own, ended) == ([signal.SIGTERM], [])


def test_a_signal_to_a_forked_child_is_not_this_ranks(watched: tuple[RankStopping, list[Any]]) -> None:
    """Such as one that loads data, which ends as by default."""
    stopping, ended = watched
    stopping.install()
    if not (child := os.fork()):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(3)
    inside(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not ended


def test_a_loop_that_is_woken_by_signals_keeps_its_descriptor() -> None:
    """asyncio's, whose handlers would never run."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        stopping = RankStopping()
        stopping.install()
        stopping.restore()
        assert signal.set_wakeup_fd(-1) == writer.fileno()


def test_all_is_as_it_was_after_leaving(watched: tuple[RankStopping, list[Any]]) -> None:
    """Handlers, the descriptor, the thread; nothing is set off the main thread."""
    stopping, _ = watched
    thread = threading.Thread(target=RankStopping().install)
    thread.start()
    thread.join()
    assert signal.set_wakeup_fd(-1) == -1
    stopping.install()
    assert PROBE is not None
    assert signal.getsignal(PROBE) == stopping._came_back
    stopping.restore()
    assert [signal.getsignal(number) for number in (PROBE, *STOPS)] == [signal.SIG_DFL] * (1 + len(STOPS))
    assert signal.set_wakeup_fd(-1) == -1
    until = time.monotonic() + HANGING_S
    while any(thread.name == "signals" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
