"""The spec as a learner would have it, from its model and settings."""

from collections.abc import Mapping

from pydantic import ValidationError
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import fragments_of
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.settings import SyncSettings
from diloco.workers.checks.frozen_digests import frozen_digests
from diloco.workers.parameters import tensor_table, trained_tensors


def fitting(sync: SyncSettings, model: nn.Module) -> SyncSettings:
    """The settings with no more fragments than the model has trained tensors, if nobody asked for a number of them.

    Raises:
        UsageError: as `trained_tensors`.
    """
    if "fragments" in sync.model_fields_set:
        return sync
    return sync.model_copy(update={"fragments": fragments_of(sync.fragments, len(trained_tensors(model)))})


def proposal(
    model: nn.Module, sync: SyncSpec, trainer: Mapping[str, str | int | float | bool | None], same_frozen: bool
) -> Spec:
    """What is proposed to a run that has no spec, and compared with the spec of one that has.

    Args:
        model: judged (`model_checks`).
        sync, trainer: as in the spec.
        same_frozen: frozen parameters are part of what is agreed on.

    Raises:
        UsageError: model and settings cannot be a run's.
    """
    frozen = frozen_digests(model) if same_frozen else None
    try:
        return Spec(sync=sync, tensors=tensor_table(model, sync), trainer=dict(trainer), frozen=frozen)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the run's spec"
        raise UsageError(f"{where}: {problem['msg']}") from error
