"""Packages that only some data and models need. Each comes with an extra, which is named where it is missing."""

import importlib
from typing import Any

from diloco.pipeline.errors import UsageError, missing


def library(name: str, extra: str, what: str) -> Any:
    """Import an optional package, or a module of it.

    Args:
        name: the module.
        extra: which brings the package.
        what: needs it.

    Raises:
        UsageError: it is missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(missing(name.split(".")[0], extra, what)) from error


def first_line(error: Exception) -> str:
    """Of what an error says, with the next one if it ends in a colon, behind its kind if it names a key alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return f"{type(error).__name__} {said}" if isinstance(error, KeyError) else said
