"""End somebody else's training loop on SIGTERM or SIGHUP: between two inner steps, flushed and saved.

A signal is handled only in the main thread, and only if its handler is the system's default, which would end the
process without a word to anybody. The handler only notes the signal, and `Learner.finished` becomes true. A loop that
does not look at it is ended by `SystemExit` in its next step but one. A second SIGTERM ends the process at once, as by
default.

If a signal goes to the whole process group, as with systemd and `timeout`, it also ends the workers of a DataLoader.
Torch's handler of SIGCHLD would then raise wherever the training thread is, even in the middle of leaving. So these
errors are suppressed from the first signal on.
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
    """Suppress the error of torch's SIGCHLD handler when a DataLoader's worker dies; the loader still notices."""
    if not hasattr(signal, "SIGCHLD"):  # Windows
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and handler.__module__ == "torch.utils.data._utils.signal_handling":

        def suppressed(number: int, frame: FrameType | None) -> None:
            with suppress(RuntimeError):
                handler(number, frame)

        signal.signal(signal.SIGCHLD, suppressed)


class Stopped(SystemExit):
    """The process was asked to end, and does so between two inner steps, with a status that has it restarted."""

    def __init__(self, number: int) -> None:
        """number: the signal's number."""
        super().__init__(AGAIN_STATUS)
        self.number = number


class Stopping:
    """The signals that have asked this process to end, between `install` and `restore`."""

    def __init__(self) -> None:
        self._asked = 0  # the signal that asked this process to end
        self.heard = 0  # the signal that came here
        self.together = False  # several ranks must end at the same step: by `agree`, not by what one of them has heard
        self._told = False  # a signal other than SIGHUP came
        self._seen = self._stepped = False
        self._over = False
        self._installed: list[int] = []
        self._pid = os.getpid()

    @property
    def came(self) -> bool:
        """True if a signal came, here or (as the ranks have agreed) to another rank.

        Unlike with `asked`, code that reads this is not expected to end.
        """
        return bool(self.heard or self._asked)

    @property
    def asked(self) -> bool:
        """True if a signal came. Code that reads this is expected to end then."""
        self._seen |= self._asked > 0
        return self._asked > 0

    def install(self) -> None:
        """Note, from now on, signals that would end the process; call it once, before `restore`."""
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                handler = signal.getsignal(number)
                earlier = getattr(handler, "__self__", None)
                if handler is signal.SIG_DFL or (isinstance(earlier, Stopping) and earlier._over):
                    self._installed.append(number)
                    signal.signal(number, self._note)

    def restore(self) -> None:
        """Restore the default handlers. If another thread calls this, the handler stays and acts like the default."""
        self._over = True
        if threading.current_thread() is threading.main_thread():
            for number in self._installed:
                if signal.getsignal(number) == self._note:  # otherwise another part of the program has replaced it
                    signal.signal(number, signal.SIG_DFL)
            self._installed = []

    def leave_if_asked(self) -> None:
        """End if a signal came, while nothing is trained yet.

        Raises:
            Stopped: a signal came.
        """
        if self.heard:
            raise Stopped(self.heard)

    def agree(self) -> None:
        """Note that some rank was asked to end, so that all ranks end after the current step."""
        self._asked = self._asked or signal.SIGTERM

    def raise_if_unread(self) -> None:
        """End after the training if a signal came that the loop did not look at.

        Raises:
            Stopped: a signal came, and `asked` has not been read.
        """
        if not self._seen and self._asked:
            raise Stopped(self._asked)

    def stepped(self) -> None:
        """Note that an inner step is over and counted.

        Raises:
            Stopped: a signal had come before the previous step was over, and the loop continued.
        """
        if self._stepped:
            raise Stopped(self._asked)
        self._stepped = self._asked > 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        hangup = number == HANGUP  # usually comes twice (`pipeline.process.signals`), so none counts as the second
        elsewhere = os.getpid() != self._pid  # in a forked child, e.g. a DataLoader's worker
        if self._over or elsewhere or (self._told and not hangup):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        _spare_loaders()
        self._told |= not hangup
        self.heard = self.heard or number
        if not self.together:
            self._asked = self._asked or number
