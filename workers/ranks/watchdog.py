"""Ends a rank that is asked to end while its main thread is inside torch, where Python's signal handlers do not run.

In a collective that another rank never joins, a thread waits for up to an hour, and Python runs handlers only between
two bytecode instructions. So a second thread reads which signals arrive (`signal.set_wakeup_fd`) and checks whether the
main thread still returns to Python. For this it sends the main thread SIGURG, which nothing else uses; the handler of
SIGURG records the time.

| signal                                      | the main thread            | what happens                           |
|---------------------------------------------|----------------------------|----------------------------------------|
| SIGTERM, SIGHUP, noted by the learner       | comes back                 | the loop ends between two steps        |
| SIGINT                                      | comes back                 | KeyboardInterrupt                      |
| any of the above                            | not within `waits_s`       | the process ends, and says where it is |
| a second one (SIGHUP never counts as one)   | not within `AGAIN_S`       | the same                               |
| one with a handler of the program's own     | in any state               | what that handler does                 |

Nothing is watched in a program whose main thread already has a wakeup descriptor (asyncio's `add_signal_handler`).
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import structlog

from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.waiting import TICK_S
from diloco.workers.background import OwnThread
from diloco.workers.stopping import HANGUP, STOPS, Stopping

# Seconds that the main thread has to come back after a signal, or to call the learner after the exchange has failed. If
# steps take longer, it has the time of `STEPS` steps.
BACK_S = 10.0
STEPS = 2
# Upper limit of that time. One step that contains an evaluation or a compilation raises the average step time for many
# steps, and the learner is down for as long as the wait takes. Ending sooner loses at most a step that no rank can
# publish any more.
MOST_S = 120.0
# Seconds that the main thread has to come back after a second signal.
AGAIN_S = 2.0
LOOK_S = 0.5
# Seconds for the other ranks and the bus to hear why this rank ends, after one signal and after a second one.
SAID_S, SAID_AT_ONCE_S = 10.0, 2.0
PROBE: signal.Signals | None = getattr(signal, "SIGURG", None)  # Windows has none
# Number of the main thread's innermost calls that are named in the log.
SHOWN = 3


class RankStopping(Stopping):
    """The requests to end that a rank received by signals, also while its main thread is inside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.together = True
        self.step_s: Callable[[], float] = lambda: 0.0
        """Returns the duration of this rank's steps, in seconds."""
        self.say: Callable[[str, float], str] = lambda why, within_s: why
        """Tells the other ranks and the bus why this rank ends, within a time in seconds; returns what to log."""
        self._back_s = 0.0
        """Time at which the main thread was last known to be in Python."""
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None

    def install(self) -> None:
        """Note the signals, as `Stopping.install` does, and begin to watch."""
        super().install()
        if threading.current_thread() is not threading.main_thread() or PROBE is None:
            return
        if signal.getsignal(PROBE) is not signal.SIG_DFL:
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # it belongs to asyncio, whose loop is woken through it: give it back and do not watch
            signal.set_wakeup_fd(before)
            reader.close()
            writer.close()
            return
        self._reader, self._writer = reader, writer
        signal.signal(PROBE, self._came_back)
        _watches.append(self)
        OwnThread("signals", self._watch).start()

    def restore(self) -> None:
        """Undo `install`. If called in another thread than the main one, the watch stays but does nothing."""
        super().restore()
        if threading.current_thread() is not threading.main_thread() or self._writer is None:
            return
        if (now := signal.set_wakeup_fd(-1)) != self._writer.fileno():
            signal.set_wakeup_fd(now)
        if PROBE is not None and signal.getsignal(PROBE) == self._came_back:
            signal.signal(PROBE, signal.SIG_DFL)
        with suppress(OSError):
            self._writer.send(b"\0")
        self._writer.close()
        self._writer = None
        _watches.remove(self)

    def _came_back(self, number: int, frame: FrameType | None) -> None:
        self._back_s = time.monotonic()

    # --- the thread beside --------------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._reader is not None  # noqa: S101  # made before the thread
        asked = count = 0  # the signal that the main thread must come back for; the number of signals that came
        again = False  # a second signal came, so that the main thread has only AGAIN_S
        seen_s = until_s = 0.0
        with self._reader as reader:
            while (came := self._read(reader, LOOK_S if asked else None)) is not None:
                now = time.monotonic()
                if not asked and came:
                    asked, seen_s, until_s = came[0], self._back_s, now + self._given_s()
                count += sum(number != HANGUP for number in came)
                if came and count > 1:
                    until_s, again = min(until_s, now + AGAIN_S), True
                # The main thread came back to Python, but it may enter torch again before its loop ends: watch on.
                if self._back_s != seen_s:
                    seen_s, until_s, again = self._back_s, now + self._given_s(), False
                    asked = asked if self.heard else 0  # 0: KeyboardInterrupt was raised; the loop sees it
                    count = count if asked else 0
                elif asked and now > until_s and not self._over:
                    self._end(asked, again)
                if asked and not self._over:
                    self._probe()

    def _read(self, reader: socket.socket, within_s: float | None) -> list[int] | None:
        """Return the watched signals that came, after at most `within_s` seconds; None once the watch is over."""
        until_s = None if within_s is None else time.monotonic() + within_s
        while until_s is None or time.monotonic() < until_s:
            reader.settimeout(None if until_s is None else max(until_s - time.monotonic(), TICK_S))
            try:
                read = reader.recv(1024)
            except TimeoutError:
                break
            if not read or 0 in read:
                return None
            if came := [number for number in read if self._is_watched(number)]:
                return came
        return []

    @staticmethod
    def _probe() -> None:
        main = threading.main_thread().ident
        assert main is not None  # noqa: S101  # it runs
        assert PROBE is not None  # noqa: S101  # else nothing is watched
        signal.pthread_kill(main, PROBE)

    def _given_s(self) -> float:
        return waits_s(self.step_s())

    def _is_watched(self, number: int) -> bool:
        if self._over:
            return False
        handler = signal.getsignal(number)
        return (number in STOPS and handler == self._note) or handler is signal.default_int_handler

    def _end(self, number: int, again: bool) -> None:
        name = signal.Signals(number).name
        since = f"came again, and {AGAIN_S:g} s later" if again else f"came, and {self._given_s():.3g} s later"
        why = f"{name} {since} its main thread still waits in {waits_in()}"
        with suppress(Exception):  # the process ends in any case
            why = self.say(why, SAID_AT_ONCE_S if again else SAID_S)
        structlog.get_logger().error("rank_ended", detail=why)
        os._exit(128 + number if number == signal.SIGINT else AGAIN_STATUS)


def waits_s(step_s: float) -> float:
    """Return the seconds that a main thread which may wait for ever is given, by its step time in seconds."""
    return max(BACK_S, min(MOST_S, STEPS * step_s))


def waits_in() -> str:
    """Return the main thread's innermost calls as text, innermost first, and the innermost call outside torch."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)[::-1]
    own = next((one for one in stack if f"{os.sep}torch{os.sep}" not in one.filename), None)
    shown = stack[:SHOWN] if own is None or own in stack[:SHOWN] else [*stack[: SHOWN - 1], own]
    return ", in ".join(f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in shown)


# The installed watches of this process.
_watches = list[RankStopping]()


def _let_go() -> None:
    """Remove the watches in a forked child, such as a data-loading worker: its signals are not this rank's."""
    for one in _watches:
        with suppress(ValueError):  # only the main thread may set the descriptor
            signal.set_wakeup_fd(-1)
        if one._writer is not None:
            one._writer.close()
            one._writer = None
    _watches.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
