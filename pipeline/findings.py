"""Results of the checks made before or at the start of a run, each with its remedy. Pure."""

from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """One line of `diloco doctor`. A syncer logs the same findings at its start, or refuses to start on an error."""

    level: Level
    about: str
    """The thing that was checked, in a word or two."""
    found: str
    remedy: str = ""
    """The action to take; empty if nothing is wrong."""

    def __str__(self) -> str:
        return f"{self.found}; {self.remedy}" if self.remedy else self.found


def ok(about: str, found: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding("ok", about, found)


def warning(about: str, found: str, remedy: str) -> Finding:
    """Return a finding with which a run works, but worse than it could."""
    return Finding("warning", about, found, remedy)


def error(about: str, found: str, remedy: str) -> Finding:
    """Return a finding that prevents a run from starting or from working properly."""
    return Finding("error", about, found, remedy)
