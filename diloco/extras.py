"""Import optional packages, and say how to install a missing one."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from diloco.pipeline.errors import UsageError, missing

# Optional packages -> the extra of this project that installs them.
EXTRAS = {"torch": "learner", "matplotlib": "run"} | {n: n for n in ("tensorboard", "wandb", "trackio", "mlflow")}
# A separate distribution, made from the folder `studies/` of a checkout.
STUDIES = "diloco_studies"


def load_extra(module: str, command: str) -> ModuleType:
    """Import a module that needs an optional package or is one.

    Raises:
        UsageError: the package is missing; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package == STUDIES:
            raise UsageError(
                f"`diloco {command}` is part of the studies; in a checkout, install them: {sys.executable} -m pip "
                "install -c constraints.txt -e studies"
            ) from error
        if package not in EXTRAS:
            raise
        raise UsageError(missing(package, EXTRAS[package], f"`diloco {command}`")) from error


@contextmanager
def naming_extra(module: str, extra: str) -> Iterator[None]:
    """Name the extra to install if an import in the block fails.

    Args:
        module: the module of this project whose imports these are.
        extra: the extra that installs what it imports.

    Raises:
        ModuleNotFoundError: a package is missing; the message says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        raise ModuleNotFoundError(missing(package, extra, module), name=error.name) from error


def need_extras() -> None:
    """Check that the optional packages of `diloco run` are installed, without importing them, which takes seconds.

    Raises:
        UsageError: one is missing; the message says how to install it.
    """
    for package in ("torch", "matplotlib"):
        if find_spec(package) is None:
            raise UsageError(missing(package, "run", "a run on one machine"))
