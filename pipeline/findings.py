"""What was looked at before a run or at its start, how it was found, and what to do about it. Pure."""

from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """One line of `diloco doctor`; the same that a syncer logs or refuses to start for."""

    level: Level
    about: str
    """What was looked at, in a word or two."""
    found: str
    remedy: str = ""
    """What to do; of what is in order nothing."""

    def __str__(self) -> str:
        return f"{self.found}; {self.remedy}" if self.remedy else self.found


def ok(about: str, found: str) -> Finding:
    """As it should be."""
    return Finding("ok", about, found)


def warning(about: str, found: str, remedy: str) -> Finding:
    """A run goes on with it, worse than it could."""
    return Finding("warning", about, found, remedy)


def error(about: str, found: str, remedy: str) -> Finding:
    """No run begins, or none goes well, as long as this is so."""
    return Finding("error", about, found, remedy)
