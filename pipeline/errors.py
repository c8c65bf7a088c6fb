"""Every error that crosses a module boundary, grouped by who can fix it.

`PeerError` and its subclasses: another party's bytes or settings are at fault; the message says what was wrong.
`BusError` and its subclasses: the bus (Redis) could not do what was asked; retry or read again, as each class says.
`UsageError`: the person at the command line can fix it; it is shown without a traceback.
"""

from typing import Any, Self


class DilocoError(Exception):
    """Base of all errors raised on purpose: what was found, a remedy, and what a server or library said."""

    def __init__(self, found: str = "", remedy: str = "", said: str = "") -> None:
        """Set the parts of the message; `said` is a server's or library's own words, which come last."""
        super().__init__(found)
        self.found, self.remedy, self.said = found, remedy, said

    @property
    def problem(self) -> str:
        """The message without the remedy."""
        return f"{self.found} ({self.said})" if self.said else self.found

    def __str__(self) -> str:
        if not self.remedy:
            return self.problem
        return f"{self.found}; {self.remedy}" + (f" ({self.said})" if self.said else "")


class UsageError(DilocoError):
    """Bad settings, paths or environment. The message says what is allowed and what to do."""


def missing(package: str, extra: str, what: str) -> str:
    """Return the message for an optional package that `what` needs; this project's `extra` installs it."""
    return f"{what} needs {package}, which is not installed: pip install 'diloco[{extra}]'"


class LoginRefused(UsageError):
    """The bus does not accept this party's user or password."""


class NotPermitted(UsageError):
    """The bus does not permit this party's user to run a command or use a key."""


class PeerError(DilocoError):
    """Another party sent something that cannot be used."""


class BadMessage(PeerError):
    """A wire message that does not decode, has a field out of bounds, or has another format version."""


class OtherFormat(BadMessage):
    """The parties of this run use another wire format than this build."""


class Oversized(BadMessage):
    """There is more data than any party of the run writes there. It was not read to its end."""


class BadPayload(PeerError):
    """A payload has chunks that are missing, out of order, of the wrong size, or that do not match their digest."""


class SpecMismatch(PeerError):
    """This party and the run's spec disagree. The message lists each differing field with both values."""

    def __init__(self, message: str, tensors: bool = False) -> None:
        """Set the message; `tensors` is True if names, shapes or types of tensors differ."""
        super().__init__(message)
        self.tensors = tensors


class RunReplaced(DilocoError):
    """Another run now exists under the name of this party's run. The party does not join it on its own."""


class IdTaken(DilocoError):
    """Another process has this learner's id. The message says which one, and what to do."""


class LearnerReplaced(IdTaken):
    """Another process took over this learner's id because this one was silent for too long. This one ends."""

    def __init__(self, message: str, generation: int) -> None:
        """Set the message; `generation` is that of the process that holds the id now."""
        super().__init__(message)
        self.generation = generation

    def __reduce__(self) -> tuple[type[Self], tuple[str, int], dict[str, Any]]:
        """Pickle both arguments: by default an exception is rebuilt from `args`, which has one of the two."""
        return type(self), (self.found, self.generation), vars(self)


class LearnerDiverged(DilocoError):
    """This learner's deltas were repeatedly not finite. It ends, and has to be started again."""


class RankGone(DilocoError):
    """A rank of this learner ended or is out of step. The learner ends, and is restarted as a whole."""


class BusError(DilocoError):
    """Base of the errors that the bus may raise."""


class BusUnavailable(BusError):
    """The bus cannot be reached or timed out. The outcome of a write is unknown: read again before retrying."""


class ScriptsMissing(BusUnavailable):
    """The bus lacks the Lua scripts of this party's release. Only a syncer of that release can load them."""


class BusFull(BusError):
    """The bus refuses writes: memory or disk is full, or replicas are missing. Nothing was written; try again later."""


class LeaseLost(BusError):
    """A syncer's write was refused: its lease on the fragment lapsed, or another owner holds it."""


class HeadMoved(BusError):
    """A syncer's write was refused: the fragment's head is not the one that the write was based on. Load it again."""


class PayloadIncomplete(BusError):
    """A commit was refused: a staged payload lacks some of its chunks. Stage it again."""


# Exit status of a process that ends because of something that only a person can fix. Supervisors must not restart it.
REFUSED_STATUS = 2


def exit_status(error: DilocoError) -> int:
    """Return the exit status for an error: `REFUSED_STATUS` if a restart cannot help on its own, otherwise 1."""
    return REFUSED_STATUS if isinstance(error, (UsageError, SpecMismatch, OtherFormat, RunReplaced)) else 1


def outage_event(error: BaseException) -> str:
    """Return the name of the log event for an error of the bus after which a party tries again."""
    events = {BusFull: "bus_full", ScriptsMissing: "scripts_missing", PeerError: "data_unreadable"}
    return next((event for kind, event in events.items() if isinstance(error, kind)), "bus_unavailable")
