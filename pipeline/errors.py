"""Every error that crosses a module boundary, split by blame.

`PeerError` and below: the bytes or settings of another party are at fault; the message names what was wrong.
`BusError` and below: the bus (Redis) could not do what was asked; retry or re-read, as each says.
`UsageError`: the person at the command line can mend it; shown without a traceback.
"""

from typing import Any, Self


class DilocoError(Exception):
    """Base of all errors raised on purpose by this project: what was found, what to do about it, what others said."""

    def __init__(self, found: str = "", remedy: str = "", said: str = "") -> None:
        """said: by a server or a library, in its own words, which come last."""
        super().__init__(found)
        self.found, self.remedy, self.said = found, remedy, said

    @property
    def told(self) -> str:
        """All but the remedy."""
        return f"{self.found} ({self.said})" if self.said else self.found

    def __str__(self) -> str:
        if not self.remedy:
            return self.told
        return f"{self.found}; {self.remedy}" + (f" ({self.said})" if self.said else "")


class UsageError(DilocoError):
    """Bad settings, paths or environment: the message says what is allowed and what to do next."""


def missing(package: str, extra: str, what: str) -> str:
    """What to tell of an optional package that `what` needs. extra: of this project, which brings it."""
    return f"{what} needs {package}, which is not installed: pip install 'diloco[{extra}]'"


class LoginRefused(UsageError):
    """The bus does not know this party's user, or not its password."""


class NotPermitted(UsageError):
    """The bus does not let this party's user do that."""


class PeerError(DilocoError):
    """Another party sent something that cannot be used."""


class BadMessage(PeerError):
    """A wire message that does not decode, is out of bounds, or is of another format version."""


class OtherFormat(BadMessage):
    """A run whose parties speak another wire format than this build."""


class Oversized(BadMessage):
    """More than any party of the run writes there; it was not read to its end."""


class BadPayload(PeerError):
    """A payload whose chunks are missing, out of order, of the wrong size, or fail their digest."""


class SpecMismatch(PeerError):
    """This party and the run's spec disagree; the message shows each differing field with both values."""

    def __init__(self, message: str, tensors: bool = False) -> None:
        """tensors: names, shapes or types of tensors differ."""
        super().__init__(message)
        self.tensors = tensors


class RunReplaced(DilocoError):
    """Another run stands where this party's was, under the same name: it does not go on in it by itself."""


class IdTaken(DilocoError):
    """Another process has this learner's id; the message says which one, and what to do."""


class LearnerReplaced(IdTaken):
    """Another process came in the place of this learner, which was silent for too long: this one ends."""

    def __init__(self, message: str, generation: int) -> None:
        """generation: of the one that holds the id now."""
        super().__init__(message)
        self.generation = generation

    def __reduce__(self) -> tuple[type[Self], tuple[str, int], dict[str, Any]]:
        """An exception is made again from its arguments; this one has two."""
        return type(self), (self.found, self.generation), vars(self)


class LearnerDiverged(DilocoError):
    """What this learner trains is not finite, again and again: it ends, and is to be started again."""


class RankGone(DilocoError):
    """A rank of this learner is gone, or does not keep step: the learner ends, and is started again as a whole."""


class BusError(DilocoError):
    """Base of what the bus may raise."""


class BusUnavailable(BusError):
    """The bus cannot be reached or timed out. The outcome of a write is unknown: re-read before retrying."""


class ScriptsMissing(BusUnavailable):
    """The bus does not know what this party's release calls there, and only a syncer of that release may tell it."""


class BusFull(BusError):
    """The bus refuses writes for want of memory or disk. Nothing was written; try again later."""


class LeaseLost(BusError):
    """A syncer write was refused because another owner holds the fragment's lease (or it lapsed)."""


class HeadMoved(BusError):
    """A syncer write was refused because the fragment's head is not the one it was based on: reload it."""


class PayloadIncomplete(BusError):
    """A commit was refused because a staged payload does not have all of its chunks: stage it again."""


REFUSED_STATUS = 2
"""Exit status of a process that was refused what only a person can mend."""


def exit_status(error: DilocoError) -> int:
    """Of a process that ends by it: to start it again helps only where nobody has to mend anything before."""
    return REFUSED_STATUS if isinstance(error, (UsageError, SpecMismatch, OtherFormat, RunReplaced)) else 1


def outage_event(error: BaseException) -> str:
    """Name of the log event that tells of it: Redis refuses writes, lacks scripts, or cannot be reached."""
    if isinstance(error, BusFull):
        return "bus_full"
    return "scripts_missing" if isinstance(error, ScriptsMissing) else "bus_unavailable"
