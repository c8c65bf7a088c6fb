"""SIGTERM and SIGHUP in somebody else's training loop: it ends between two inner steps, flushed and saved.

Only where nobody else handles them: in the main thread, and in place of the system's default, which would end the
process with nothing said to anybody. The handler only notes the signal. Then `Learner.finished` is true; a loop that
does not ask ends in its next `step` but one, by `SystemExit`. A second SIGTERM ends the process at once, as by default.

A signal to the whole process group, as systemd and `timeout` send it, also ends the workers of a DataLoader. torch's
handler of SIGCHLD would raise for it wherever the training thread is, in the middle of leaving too. So it is left out
from the first signal on.
"""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType

from diloco.pipeline.process.signals import AGAIN_STATUS

HANGUP = getattr(signal, "SIGHUP", None)
STOPS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def _spare_loaders() -> None:
    """From now on nothing is raised where a worker of torch's DataLoader dies; the loader still sees it."""
    if not hasattr(signal, "SIGCHLD"):  # Windows
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and handler.__module__ == "torch.utils.data._utils.signal_handling":

        def spared(number: int, frame: FrameType | None) -> None:
            with suppress(RuntimeError):
                handler(number, frame)

        signal.signal(signal.SIGCHLD, spared)


class Stopped(SystemExit):
    """The process was asked to end, between two inner steps; its status has it started again."""

    def __init__(self, number: int) -> None:
        """number: of the signal."""
        super().__init__(AGAIN_STATUS)
        self.number = number


class Stopping:
    """What a process was asked by a signal, from `install` to `restore`."""

    def __init__(self) -> None:
        self._asked = 0
        self.heard = 0
        """The signal that came."""
        self.together = False
        """This is a rank among several, which end at the same step: by `agree`, and not by what one has heard."""
        self._told = False
        """By another signal than SIGHUP."""
        self._seen = self._stepped = False
        self._over = False
        self._installed: list[int] = []
        self._pid = os.getpid()

    @property
    def came(self) -> bool:
        """A signal came, here or, as ranks have agreed, to another rank; for whoever looks behind the loop."""
        return bool(self.heard or self._asked)

    @property
    def asked(self) -> bool:
        """A signal came. Who reads this is expected to end."""
        self._seen |= self._asked > 0
        return self._asked > 0

    def install(self) -> None:
        """From now on signals that would end the process are noted; once, before `restore`."""
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                handler = signal.getsignal(number)
                earlier = getattr(handler, "__self__", None)
                if handler is signal.SIG_DFL or (isinstance(earlier, Stopping) and earlier._over):
                    self._installed.append(number)
                    signal.signal(number, self._note)

    def restore(self) -> None:
        """As it was before. In another thread the handler stays, and does what the default does."""
        self._over = True
        if threading.current_thread() is threading.main_thread():
            for number in self._installed:
                if signal.getsignal(number) == self._note:  # else somebody else's by now
                    signal.signal(number, signal.SIG_DFL)
            self._installed = []

    def leave_if_asked(self) -> None:
        """While nothing is trained yet.

        Raises:
            Stopped: a signal came.
        """
        if self.heard:
            raise Stopped(self.heard)

    def agree(self) -> None:
        """A rank was asked to end: all do, after the present step."""
        self._asked = self._asked or signal.SIGTERM

    def leave_if_unseen(self) -> None:
        """When all is over.

        Raises:
            Stopped: a signal came, and nobody has looked.
        """
        if not self._seen and self._asked:
            raise Stopped(self._asked)

    def stepped(self) -> None:
        """An inner step is over and counted.

        Raises:
            Stopped: a signal had come before the last one was over, and the loop went on.
        """
        if self._stepped:
            raise Stopped(self._asked)
        self._stepped = self._asked > 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        hangup = number == HANGUP  # comes twice as a rule (`pipeline.process.signals`): never the second of two
        elsewhere = os.getpid() != self._pid  # in a child, e.g. one that loads data
        if self._over or elsewhere or (self._told and not hangup):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        _spare_loaders()
        self._told |= not hangup
        self.heard = self.heard or number
        if not self.together:
            self._asked = self._asked or number
