"""SIGTERM and SIGHUP in somebody else's training loop: it ends between two inner steps, flushed and saved.

Only where nobody else handles them: in the main thread, and in place of the system's default, which would end the process
with nothing said to anybody. A handler only notes the signal. Then `Learner.finished` is true; a loop that does not
ask ends at its next `step` but one, by `SystemExit`. A second signal ends the process at once, as by default.
"""

import os
import signal
import threading
from types import FrameType

STOPS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopping:
    """What a process was asked by a signal, from `install` to `restore`."""

    def __init__(self) -> None:
        self._asked = self._told = 0
        self._installed: list[int] = []
        self._pid = os.getpid()

    @property
    def asked(self) -> bool:
        """A signal came."""
        return self._asked > 0

    def install(self) -> None:
        """From now on signals that would end the process are noted."""
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._installed.append(number)
                    signal.signal(number, self._note)

    def restore(self) -> None:
        """As it was before. In another thread, and in a process that was forked meanwhile, all stays as it is."""
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._pid:
            for number in self._installed:
                if signal.getsignal(number) == self._note:  # else somebody else's by now
                    signal.signal(number, signal.SIG_DFL)
            self._installed = []

    def leave_if_asked(self) -> None:
        """While nothing is trained yet.

        Raises:
            SystemExit: a signal came; with the status of a process that it ended.
        """
        if self._asked:
            raise SystemExit(128 + self._asked)

    def stepped(self) -> None:
        """An inner step is over and counted.

        Raises:
            SystemExit: the step before was over when the signal had come, and the loop went on.
        """
        if self._told:
            self.leave_if_asked()
        self._told = self._asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked or os.getpid() != self._pid:  # a second one; or a child, e.g. one that loads data
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._asked = number
