"""What watches whether the main thread comes back after a signal, in this process: what it touches, and what not."""

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.workers.ranks import shutdown
from diloco.workers.ranks.shutdown import HANG_S, PROBE, SECOND_SIGNAL_S, RankStopping
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


class Watched:
    """A watch by a clock that only its test moves, and how it would have ended this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.ended = list[tuple[int, bool]]()
        self.reads = 0
        """How often it has read signals, its own probes' among them."""
        self.came = list[int]()
        monkeypatch.setattr(shutdown, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=time.sleep))
        monkeypatch.setattr(shutdown, "PROBE_S", 0.01)
        self.stopping = RankStopping()
        read, is_watched = self.stopping._read, self.stopping._is_watched

        def noted(reader: socket.socket) -> list[int] | None:
            self.reads += 1
            return read(reader)

        def judged(number: int) -> bool:
            if number != PROBE:
                self.came.append(number)
            return is_watched(number)

        monkeypatch.setattr(self.stopping, "_read", noted)
        monkeypatch.setattr(self.stopping, "_is_watched", judged)
        monkeypatch.setattr(self.stopping, "_end", lambda *how: self.ended.append(how))

    @property
    def asks(self) -> bool:
        """Whether it asks the main thread to come back."""
        return self.stopping._awaited > 0

    def passes(self, seconds: float) -> None:
        """So much time, and it has looked since: the main thread, where it is here, has come back."""
        self.now_s += seconds
        self.looks_twice()
        if threading.current_thread() is threading.main_thread() and not self.stopping._over:
            until(lambda: self.stopping._responded_s == self.now_s)
            self.looks_twice()

    def looks_twice(self) -> None:
        """Wait until it has read what came, twice."""
        for _ in range(2):
            reads = self.reads
            if self.stopping._over:  # it probes no more: a signal that nobody watches has it look
                os.kill(os.getpid(), signal.SIGURG)
            until(lambda: self.reads > reads)  # noqa: B023  # called here

    def is_ended_after(self, limit_s: float) -> None:
        """Let so much time pass, and see that nobody is ended shortly before; the caller asks by which signal."""
        self.passes(0.9 * limit_s)
        assert not self.ended
        self.passes(0.2 * limit_s)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(monkeypatch)
    yield watched
    watched.stopping.restore()


def until(true: Callable[[], Any]) -> None:
    by_s = time.monotonic() + HANGING_S
    while not true():
        assert time.monotonic() < by_s
        time.sleep(0.001)


LIBC = ctypes.CDLL(None)


def inside(beside: Callable[[], object]) -> None:
    """One call that lets other threads run and does not look for signals, as torch's collectives; another thread does
    something meanwhile, and the call lasts as long as that."""
    lock, mutex, there = LIBC.pthread_mutex_lock, ctypes.create_string_buffer(128), SimpleNamespace(entered=False)
    LIBC.pthread_mutex_init(mutex, None)
    locked = threading.Event()

    def other() -> None:
        lock(mutex)
        locked.set()
        try:
            until(lambda: there.entered)
            beside()
        finally:
            LIBC.pthread_mutex_unlock(mutex)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        locked.wait(HANGING_S)
        there.entered = True  # no handler runs between this and the call: Python looks for signals behind calls only
        lock(mutex)
    finally:
        thread.join()


def test_who_comes_back_is_not_ended_and_who_does_not_is(watched: Watched) -> None:
    """Also by a signal that was noted while it was there: it is to leave its loop."""
    watched.stopping.install()
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: watched.asks)
    for _ in range(3):
        watched.passes(0.9 * HANG_S)
    assert (watched.stopping.heard, watched.ended) == (signal.SIGTERM, [])

    inside(lambda: watched.is_ended_after(HANG_S))
    assert set(watched.ended) == {(signal.SIGTERM, False)}


def test_a_learner_that_another_thread_has_closed_ends_nobody(watched: Watched) -> None:
    """Though a signal came before: nothing is left to be ended, and the process may go on for ever."""
    watched.stopping.install()
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: watched.asks)
    watched.passes(0.0)
    closing = threading.Thread(target=watched.stopping.restore)
    closing.start()
    closing.join()
    watched.passes(0.0)  # whatever it has asked before is answered
    watched.passes(3 * HANG_S)
    assert (watched.stopping.heard, watched.ended) == (signal.SIGTERM, [])


def test_a_second_signal_hurries_who_is_away_also_after_it_was_there(watched: Watched) -> None:
    """It came back after the first one, and is inside torch as the second one comes."""
    watched.stopping.install()
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: watched.asks)
    watched.passes(0.5 * HANG_S)

    def beside() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: signal.SIGINT in watched.came)
        watched.is_ended_after(SECOND_SIGNAL_S)

    with pytest.raises(KeyboardInterrupt):
        inside(beside)
    assert set(watched.ended) == {(signal.SIGTERM, True)}


def test_who_came_back_after_a_second_signal_is_given_all_the_time_again(watched: Watched) -> None:
    """If it goes away again it is not said that the last signal came 2 s ago."""
    watched.stopping.install()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    until(lambda: signal.SIGINT in watched.came)
    watched.passes(0.5 * SECOND_SIGNAL_S)

    inside(lambda: watched.is_ended_after(HANG_S))
    assert set(watched.ended) == {(signal.SIGTERM, False)}


def test_a_watch_whose_other_end_is_closed_is_over() -> None:
    """It reads nothing more: it does not take a core."""
    reader, writer = socket.socketpair()
    with reader:
        writer.close()
        assert RankStopping()._read(reader) is None


def test_ctrl_c_that_was_raised_is_the_loops_affair(watched: Watched) -> None:
    """A loop may catch it and go on, with steps of any length."""
    watched.stopping.install()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

    def heard() -> bool:
        watched.now_s += 1e-6  # if time stood still, a probe that a test before has sent would hide the answer
        return bool(watched.came) and not watched.asks

    until(heard)
    inside(lambda: setattr(watched, "now_s", watched.now_s + 3 * HANG_S))
    assert (watched.asks, watched.ended) == (False, [])


def test_a_programs_own_handlers_are_left_to_it(watched: Watched) -> None:
    """A rank inside torch is not ended for a signal that its program takes itself."""
    own: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: own.append(number))
    watched.stopping.install()

    def beside() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: watched.came)
        watched.now_s += 3 * HANG_S

    inside(beside)
    assert (own, watched.came, watched.asks, watched.ended) == ([signal.SIGTERM], [signal.SIGTERM], False, [])


def test_a_signal_to_a_forked_child_is_not_this_ranks(watched: Watched) -> None:
    """Such as one that loads data, which ends as by default."""
    watched.stopping.install()
    until(lambda: watched.reads)
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert (watched.came, watched.reads, watched.ended) == ([], 1, [])


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


def test_all_is_as_it_was_after_leaving(watched: Watched) -> None:
    """Handlers, the descriptor, the thread; nothing is set off the main thread."""
    stopping = watched.stopping
    thread = threading.Thread(target=RankStopping().install)
    thread.start()
    thread.join()
    assert signal.set_wakeup_fd(-1) == -1
    stopping.install()
    assert PROBE is not None
    assert signal.getsignal(PROBE) == stopping._on_probe
    stopping.restore()
    assert [signal.getsignal(number) for number in (PROBE, *STOPS)] == [signal.SIG_DFL] * (1 + len(STOPS))
    assert signal.set_wakeup_fd(-1) == -1
    until(lambda: all(thread.name != "signals" for thread in threading.enumerate()))
