"""Decoupled DiLoCo: a `Learner` for your own training loop, an `Evaluator` of the run's model, the command line, the
one-machine launcher, and their displays.

Public names are imported on first access, because a syncer must start without torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # not typing's own: importing typing takes longer than everything else here
if TYPE_CHECKING:
    from diloco.pipeline import errors
    from diloco.pipeline.settings import SyncSettings
    from diloco.workers.evaluator import Evaluator
    from diloco.workers.learner import Learner

__all__ = ["Evaluator", "Learner", "SyncSettings", "errors"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        metadata = import_module("importlib.metadata")
        try:
            return metadata.version("diloco")
        except metadata.PackageNotFoundError:
            return "0+unknown"  # a source tree that is not installed
    if name == "errors":
        return import_module("diloco.pipeline.errors")
    if name == "SyncSettings":
        return import_module("diloco.pipeline.settings").SyncSettings
    if name == "Evaluator":
        return import_module("diloco.workers.evaluator").Evaluator
    if name == "Learner":
        return import_module("diloco.workers.learner").Learner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
