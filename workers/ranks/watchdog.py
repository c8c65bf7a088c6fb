"""A rank that is asked to end while its main thread is inside torch, where no handler of Python's runs.

In a collective that another rank never joins a thread waits up to an hour, and Python runs handlers only between two
of its own instructions. So a thread beside it reads which signals come (`signal.set_wakeup_fd`), and looks whether the
main thread still comes back: by SIGURG, which nobody else uses, and whose handler says so.

| signal                                      | the main thread            | what happens                           |
|---------------------------------------------|----------------------------|----------------------------------------|
| SIGTERM, SIGHUP, noted by the learner       | comes back                 | the loop ends between two steps        |
| SIGINT                                      | comes back                 | KeyboardInterrupt                      |
| any of these                                | not in `waits_s`           | the process ends, and says where it is |
| a second one of them (SIGHUP is never it)   | not in `AGAIN_S`           | the same                               |
| one with a handler of the program's own     | whatever                   | what that handler does                 |

Of a program whose main thread has a wakeup descriptor of its own (asyncio's `add_signal_handler`) nothing is watched.
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

BACK_S = 10.0
"""For the main thread to come back after a signal, or to call the learner after the exchange has failed. Where steps
take longer, `STEPS` of them."""
STEPS = 2
MOST_S = 120.0
"""But no longer. One step with an evaluation or a compilation in it weighs in the average for many more, and the
learner is down for as long as this takes; all that is lost sooner is a step that no rank can publish any more."""
AGAIN_S = 2.0
"""The same after a second signal."""
LOOK_S = 0.5
SAID_S, SAID_AT_ONCE_S = 10.0, 2.0
"""For the other ranks and the bus to hear why; after a second signal."""
PROBE: signal.Signals | None = getattr(signal, "SIGURG", None)  # Windows has none
SHOWN = 3
"""Calls of the main thread that are named."""


class RankStopping(Stopping):
    """What a rank was asked by a signal, also while its main thread is in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.together = True
        self.step_s: Callable[[], float] = lambda: 0.0
        """Of this rank's training."""
        self.say: Callable[[str, float], str] = lambda why, within_s: why
        """Tell the other ranks and the bus why this one ends, in some time; what is to be logged."""
        self._back_s = 0.0
        """When the main thread was seen last."""
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None

    def install(self) -> None:
        """As `Stopping`; the watch begins."""
        super().install()
        if threading.current_thread() is not threading.main_thread() or PROBE is None:
            return
        if signal.getsignal(PROBE) is not signal.SIG_DFL:
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # asyncio's: its loop is woken by it
            signal.set_wakeup_fd(before)
            reader.close()
            writer.close()
            return
        self._reader, self._writer = reader, writer
        signal.signal(PROBE, self._came_back)
        _watches.append(self)
        OwnThread("signals", self._watch).start()

    def restore(self) -> None:
        """As `Stopping`. In another thread the watch stays, and does nothing."""
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
        asked = count = 0
        """The signal that the main thread is to come back for; how many there were."""
        again = False
        """It is given `AGAIN_S`: a second one came."""
        seen_s = until_s = 0.0
        with self._reader as reader:
            while (came := self._read(reader, LOOK_S if asked else None)) is not None:
                now = time.monotonic()
                if not asked and came:
                    asked, seen_s, until_s = came[0], self._back_s, now + self._given_s()
                count += sum(number != HANGUP for number in came)
                if came and count > 1:
                    until_s, again = min(until_s, now + AGAIN_S), True
                if self._back_s != seen_s:
                    seen_s, until_s, again = self._back_s, now + self._given_s(), False
                    asked = asked if self.heard else 0  # Ctrl-C was raised there: what comes of it is the loop's
                    count = count if asked else 0
                elif asked and now > until_s and not self._over:
                    self._end(asked, again)
                if asked and not self._over:
                    self._probe()

    def _read(self, reader: socket.socket, within_s: float | None) -> list[int] | None:
        """The watched signals that came, within some time at most; None: the watch is over."""
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
        with suppress(Exception):  # it ends in any case
            why = self.say(why, SAID_AT_ONCE_S if again else SAID_S)
        structlog.get_logger().error("rank_ended", detail=why)
        os._exit(128 + number if number == signal.SIGINT else AGAIN_STATUS)


def waits_s(step_s: float) -> float:
    """How long a main thread that may wait for ever is given, by the time of its steps. Seconds."""
    return max(BACK_S, min(MOST_S, STEPS * step_s))


def waits_in() -> str:
    """The calls in which this process's main thread is, the innermost first, and the innermost that is not torch's."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)[::-1]
    own = next((one for one in stack if f"{os.sep}torch{os.sep}" not in one.filename), None)
    shown = stack[:SHOWN] if own is None or own in stack[:SHOWN] else [*stack[: SHOWN - 1], own]
    return ", in ".join(f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in shown)


_watches = list[RankStopping]()
"""Of this process."""


def _let_go() -> None:
    """In a child that was forked, such as one that loads data: what it is asked is not this rank's."""
    for one in _watches:
        with suppress(ValueError):  # not forked by a thread that can have signals
            signal.set_wakeup_fd(-1)
        if one._writer is not None:
            one._writer.close()
            one._writer = None
    _watches.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
