"""Optional packages, and how to install what a command lacks."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from diloco.pipeline.errors import UsageError, missing

EXTRAS = {"torch": "learner", "matplotlib": "run"}
"""Optional packages and the extra of this project that brings them."""
STUDIES = "diloco_studies"
"""A distribution of its own: the folder `studies/` of a checkout."""


def load_extra(module: str, command: str) -> ModuleType:
    """Import a module of ours that may need an optional package.

    Raises:
        UsageError: the package is missing; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package == STUDIES:
            raise UsageError(
                f"`diloco {command}` comes with the studies; in a checkout: "
                f"{sys.executable} -m pip install -c constraints.txt -e studies"
            ) from error
        if package not in EXTRAS:
            raise
        raise UsageError(missing(package, EXTRAS[package], f"`diloco {command}`")) from error


@contextmanager
def naming_extra(module: str, extra: str) -> Iterator[None]:
    """For imports of a module of ours that comes with this extra.

    Raises:
        ModuleNotFoundError: one is missing; says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        raise ModuleNotFoundError(missing(package, extra, module), name=error.name) from error


def need_extras() -> None:
    """Look whether the optional packages are there, without importing them, which takes seconds.

    Raises:
        UsageError: one is missing; says how to install it.
    """
    for package in EXTRAS:
        if find_spec(package) is None:
            raise UsageError(missing(package, "run", "a run on one machine"))
