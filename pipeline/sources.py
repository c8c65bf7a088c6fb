"""Settings from `DILOCO_*` variables and a TOML file, and the search for misspelt names there."""

import os
import re
import tomllib
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from diloco.pipeline.errors import UsageError

ENV_PREFIX = "DILOCO_"

# Prefixes of other `DILOCO_*` variables of this project, which are not settings.
_NO_SETTINGS = ("launcher_pid", "ranks_at_work", "test_")
# Names with at least this `difflib` ratio differ by a slip of the finger.
_MISSPELT = 0.82
# Names with at least this ratio are close enough to suggest.
NEAR = 0.7


def nearest(name: str, known: Iterable[str], cutoff: float) -> str | None:
    """Return the known name that is most similar, if its `difflib` ratio is at least `cutoff`."""
    return next(iter(get_close_matches(name.lower(), sorted(known), 1, cutoff)), None)


def meant(name: str, known: Iterable[str]) -> str:
    """Return the hint to append to an unknown name: " (did you mean 'x'?)", or "" if no known name is close."""
    near = nearest(name, known, NEAR)
    return f" (did you mean {near!r}?)" if near else ""


def check_variables(known: Collection[str], wanted: Collection[str] | None = None) -> list[str]:
    """Find `DILOCO_*` variables that are not settings of any party.

    A variable may be meant for another program (Kubernetes sets some for a service `diloco-...`, and a compose file may
    use some), so it is only a warning. If its name is nearly that of a setting, it is taken for a misspelt setting.

    Args:
        known: names of all settings.
        wanted: if given, only names close to these are reported, and as warnings.

    Returns: warnings.

    Raises:
        UsageError: a variable is misspelt, and `wanted` is None.
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
            said = f"unknown variable {variable}: did you mean {ENV_PREFIX}{misspelt.upper()}?"
            if wanted is None:
                raise UsageError(f"{said} Rename it, or unset it")
            warnings.append(said)
        elif wanted is None:
            near = nearest(name, known, NEAR)
            hint = f"; the nearest is {ENV_PREFIX}{near.upper()}" if near else ""
            warnings.append(f"the variable {variable} is not a setting{hint}")
    return warnings


def read_file(config: Path | None) -> dict[str, Any]:
    """Return the table of a settings file; an empty one for None.

    Raises:
        UsageError: the file cannot be read.
    """
    if config is None:
        return {}
    try:
        # The pipe of a shell's <(...), /dev/fd/63, has a writer already. Reading any other one may block.
        if config.is_fifo() and config.parts[1:2] != ("dev",):
            raise UsageError(f"cannot read settings file {config}: it is a pipe", "give a TOML file of settings")
        table = tomllib.loads(config.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read settings file {config}: {error}") from error
    if inner := next((name for name, value in table.items() if isinstance(value, dict)), None):
        raise UsageError(f"{config}: [{inner}] is a table, but settings are top-level keys", "remove that line")
    return table


def place_in(config: Path | None, name: str) -> str:
    """Return the name of a settings file, with the line of a key if it is found."""
    lines = [] if config is None else config.read_text("utf-8-sig").splitlines()
    key = re.compile(rf"""\s*(["']?){re.escape(name)}\1\s*=""")
    line = next((number for number, text in enumerate(lines, 1) if key.match(text)), None)
    return str(config) if line is None else f"{config}, line {line}"


class ExternalSetting(NamedTuple):
    """A setting that comes from a variable or from the settings file."""

    where: str
    """The name of the variable; or the key with its file and line."""
    value: Any


def given_outside(names: Collection[str], config: Path | None) -> dict[str, ExternalSetting]:
    """Return the named settings that an environment variable or the file sets; a variable takes precedence.

    Raises:
        UsageError: the file cannot be read.
    """
    table = read_file(config)
    found = {
        name: ExternalSetting(f"{name} in {place_in(config, name)}", table[name]) for name in table if name in names
    }
    for variable, value in sorted(os.environ.items()):
        name = variable[len(ENV_PREFIX) :].lower()
        if variable.upper().startswith(ENV_PREFIX) and name in names and value:
            found[name] = ExternalSetting(variable, value)
    return found
