"""Where settings come from beside flags: `DILOCO_*` variables and a TOML file, and names misspelt there."""

import os
import re
import tomllib
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from diloco.pipeline.errors import UsageError

ENV_PREFIX = "DILOCO_"

_NO_SETTINGS = ("launcher_pid", "ranks_at_work", "test_")
"""Beginnings of the names of other `DILOCO_*` variables of this project."""
_MISSPELT = 0.82
"""Names that have so much in common differ by a slip; `difflib` counts."""
NEAR = 0.7
"""So much, and it is worth naming."""


def nearest(name: str, known: Iterable[str], cutoff: float) -> str | None:
    """The known name that is most alike, if `difflib` finds it this much alike."""
    return next(iter(get_close_matches(name.lower(), sorted(known), 1, cutoff)), None)


def meant(name: str, known: Iterable[str]) -> str:
    """What to add to a name that is not known: " (is 'x' meant?)", or nothing."""
    near = nearest(name, known, NEAR)
    return f" (is {near!r} meant?)" if near else ""


def check_variables(known: Collection[str], wanted: Collection[str] | None = None) -> list[str]:
    """Look for `DILOCO_*` variables that are no setting of any party.

    One that may be meant for other programs is a warning, for instance what Kubernetes says of a service `diloco-...`,
    or a name of one's own for compose; one that is nearly the name of a setting is taken for that, misspelt.

    wanted: only what is nearly one of these counts, and is a warning then.

    Returns: warnings.

    Raises:
        UsageError: a variable is misspelt, and nothing is `wanted`.
    """
    warnings = []
    for variable in sorted(os.environ):
        if not variable.upper().startswith(ENV_PREFIX) or not os.environ[variable]:
            continue
        name = variable[len(ENV_PREFIX) :].lower()
        if name in known or name.startswith(_NO_SETTINGS):
            continue
        misspelt = nearest(name, known if wanted is None else wanted, _MISSPELT)
        if misspelt:
            said = f"unknown variable {variable}: is {ENV_PREFIX}{misspelt.upper()} meant?"
            if wanted is None:
                raise UsageError(f"{said} Rename it, or unset it")
            warnings.append(said)
        elif wanted is None:
            near = nearest(name, known, NEAR)
            hint = f"; the nearest is {ENV_PREFIX}{near.upper()}" if near else ""
            warnings.append(f"the variable {variable} is no setting{hint}")
    return warnings


def read_file(config: Path | None) -> dict[str, Any]:
    """The table of a settings file; of none, nothing.

    Raises:
        UsageError: it cannot be read.
    """
    if config is None:
        return {}
    try:
        if config.is_fifo() and config.parts[1:2] != ("dev",):  # that of a shell, /dev/fd/63, has its writer already
            raise UsageError(f"cannot read settings file {config}: it is a pipe", "give a file of settings in TOML")
        table = tomllib.loads(config.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read settings file {config}: {error}") from error
    if inner := next((name for name, value in table.items() if isinstance(value, dict)), None):
        raise UsageError(f"{config}: [{inner}] is a table, and settings are in none", "leave that line out")
    return table


def place_in(config: Path | None, name: str) -> str:
    """A settings file, with the line of a key where that is found."""
    lines = [] if config is None else config.read_text("utf-8-sig").splitlines()
    key = re.compile(rf"""\s*(["']?){re.escape(name)}\1\s*=""")
    line = next((number for number, text in enumerate(lines, 1) if key.match(text)), None)
    return str(config) if line is None else f"{config}, line {line}"


class Given(NamedTuple):
    """A setting that a variable or the settings file gives."""

    where: str
    """The variable, or the key, its file and line."""
    value: Any


def given_outside(names: Collection[str], config: Path | None) -> dict[str, Given]:
    """Those of some settings, of whichever party, that are given by a variable, or else in the file.

    Raises:
        UsageError: the file cannot be read.
    """
    table = read_file(config)
    found = {name: Given(f"{name} in {place_in(config, name)}", table[name]) for name in table if name in names}
    for variable, value in sorted(os.environ.items()):
        name = variable[len(ENV_PREFIX) :].lower()
        if variable.upper().startswith(ENV_PREFIX) and name in names and value:
            found[name] = Given(variable, value)
    return found
