"""Decoupled DiLoCo: a `Learner` for your own loop, an `Evaluator` of what it trains; the command line, the one-machine
launcher, and what they show.

Public names load when they are asked for, since the syncer has no torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # that of typing, which takes longer to import than all else here
if TYPE_CHECKING:
    from diloco.pipeline import errors
    from diloco.pipeline.settings import SyncSettings
    from diloco.workers.evaluator import Evaluator
    from diloco.workers.learner import Learner

__all__ = ["Evaluator", "Learner", "SyncSettings", "errors"]


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("diloco.pipeline.errors")
    if name == "SyncSettings":
        return import_module("diloco.pipeline.settings").SyncSettings
    if name == "Evaluator":
        return import_module("diloco.workers.evaluator").Evaluator
    if name == "Learner":
        return import_module("diloco.workers.learner").Learner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
