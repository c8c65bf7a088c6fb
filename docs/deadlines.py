"""The page of all times that something waits for, lasts or is repeated after: deadlines.toml with the code's values.

A row's value is a formula of constants, which are imported from the file that it names, and of settings at their
defaults. `test_deadlines.py` finds constants and settings that no row has.
"""

import dataclasses
import importlib
import re
import tomllib
from collections import ChainMap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from diloco.pipeline.retry import Backoff
from diloco.pipeline.settings import EvaluatorProcess, LearnerProcess, SyncerProcess, defaults

REGISTRY = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
SETTINGS = {
    name: value for kind in (SyncerProcess, LearnerProcess, EvaluatorProcess) for name, value in defaults(kind).items()
}
FORMULA = re.compile(r"\{([^}:]+)(:x)?\}")
HEADS = {
    "deadlines": "| what | value | follows from | when it has passed | where |\n|---|---|---|---|---|",
    "repeated": "| what | every | where |\n|---|---|---|",
}


class Row(NamedTuple):
    """One time, or several that go together."""

    file: str
    """Of its constants; "": it is a setting."""
    value: str
    what: str
    follows: str = ""
    passes: str = ""

    @property
    def names(self) -> list[str]:
        """Constants, or settings, that its value has."""
        return re.findall(r"[A-Za-z_]\w+", " ".join(formula for formula, _ in FORMULA.findall(self.value)))

    @property
    def where(self) -> str:
        """Where to change it."""
        own = [name for name in dict.fromkeys(self.names) if not self.file or name not in SETTINGS]
        return f"{self.file and f'`{self.file}`: '}{', '.join(f'`{name}`' for name in own)}"

    def filled(self, text: str) -> str:
        """A text with what stands between braces: a time, or with `:x` a number."""
        there = constants(self.file)

        def shown(found: re.Match[str]) -> str:
            try:
                value = eval(found[1], {}, there)  # noqa: S307  # formulas of our own registry
            except NameError as error:
                raise KeyError(f"docs/deadlines.toml: {error} in {self.file or 'settings'}") from error
            return f"{value:g}" if found[2] else time(value)

        return FORMULA.sub(shown, text)


def rows(kind: str) -> dict[str, list[Row]]:
    """Of "deadlines" or "repeated", by heading."""
    return {title: [Row(*one) for one in found] for title, found in REGISTRY[kind].items()}


def constants(file: str) -> ChainMap[str, Any]:
    """What a file has, with the constants and fields of its classes; and settings at their defaults."""
    if not file:
        return ChainMap(SETTINGS)
    there = vars(
        importlib.import_module(f"diloco.{file.removeprefix('diloco/').removesuffix('.py').replace('/', '.')}")
    )
    of_classes: dict[str, Any] = {}
    for kind in [one for one in there.values() if isinstance(one, type) and one.__module__ == there["__name__"]]:
        of_classes |= {name: one for name, one in vars(kind).items() if isinstance(one, Backoff)}
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        of_classes |= {field.name: field.default for field in fields if isinstance(field.default, float)}
    return ChainMap(there, of_classes, SETTINGS)


def time(value: Any) -> str:
    """'0.25 s', '5 s', '10 min'; of a backoff, and of a pair, both ends."""
    match value:
        case Backoff(first_s=first_s, most_s=most_s):
            return time(first_s) if first_s == most_s else f"{time(first_s)}, doubled up to {time(most_s)}"
        case timedelta():
            return time(value.total_seconds())
        case (first, last):
            return f"{time(first)} to {time(last)}"
    if value >= 3600:
        return f"{value / 3600:g} h"
    if value >= 120:
        return f"{value / 60:g} min"
    return f"{1e3 * value:g} ms" if 0 < value < 0.1 else f"{value:.3g} s"


def summary() -> Iterator[str]:
    """For who operates a run: what happens, and who notices what after how long."""
    yield from ("| what happens | who notices what, after how long |", "|---|---|")
    for what, parts in REGISTRY["summary"].items():
        told = "; ".join(Row(file, text, what).filled(text) for file, text in parts)
        yield f"| **{what}** | {told[:1].upper()}{told[1:]}. |"


def page(note: str) -> Iterator[str]:
    """Its lines; note: that it is generated."""
    yield from ("# Deadlines", "", "You look up how long something waits, lasts or lives, and what comes then.", note)
    yield from ("", "Values of settings are their defaults, and formulas are worked out with them:")
    yield from ("[settings](settings.md) says how to change them. A lease is `lease_s`, the time to leave `leave_s`.",)
    yield from ("", "## In short", "", *summary())
    for kind, head in HEADS.items():
        for title, found in rows(kind).items():
            yield from ("", f"## {title}", "")
            if kind == "repeated":
                yield from ("Nothing ends when such a time is over: it is done, or tried, again.", "")
            yield head
            for row in found:
                cells = [row.what, row.value, row.follows, row.passes] if kind == "deadlines" else [row.what, row.value]
                yield f"| {' | '.join(row.filled(cell) for cell in cells)} | {row.where} |"
