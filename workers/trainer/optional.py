"""Imports packages that only some data and models need. If one is missing, the error names the extra that has it."""

import importlib
from typing import Any

from diloco.pipeline.errors import UsageError, missing


def library(name: str, extra: str, what: str) -> Any:
    """Import an optional package or one of its modules.

    Args:
        name: the module.
        extra: the extra that installs the package.
        what: what needs the package, for the message.

    Raises:
        UsageError: the package is missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(missing(name.split(".")[0], extra, what)) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's message.

    The next line is added if the first ends in a colon. The message of a KeyError is only a key, so its type comes
    before it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return f"{type(error).__name__} {said}" if isinstance(error, KeyError) else said
