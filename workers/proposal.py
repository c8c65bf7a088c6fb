"""The spec as a learner would have it, from its model and settings."""

import structlog
from pydantic import ValidationError
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import fragments_of
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.settings import SyncSettings, agree, load
from diloco.workers.checks.arguments import Arguments
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


def proposal(model: nn.Module, given: Arguments, held: Spec | None, waiting: int | None) -> Spec:
    """What is proposed to a run that has no spec, and compared with the spec of one that has.

    It follows the run where the learner has no settings of its own.

    Args:
        model: judged (`model_checks`).
        given: the learner's.
        held: the run's spec; None: it has none. A learner with settings of its own takes no more of it than the
            budget, if it names none.
        waiting: the budget with which a syncer waits for a spec, if one does.

    Raises:
        SpecMismatch: the learner was told another budget than the run or that syncer.
        UsageError: model and settings cannot be a run's.
    """
    budget = {} if given.tokens is None else {"tokens": given.tokens}
    trainer = given.trainer or {}
    if held is None or given.sync is not None:
        told, known = (
            (given.sync or load(SyncSettings)).model_copy(update=budget),
            held.sync.tokens if held else waiting,
        )
        sync = _own(told if known is None else agree(told, {"tokens": known}, SyncSettings), model)
    else:
        # Another model than the run's may have too few tensors: joining says how they differ.
        fragments = fragments_of(held.sync.fragments, len(trained_tensors(model)))
        sync, trainer = held.sync.model_copy(update={"fragments": fragments} | budget), trainer or held.trainer
    frozen = frozen_digests(model) if given.same_frozen else None
    try:
        return Spec(sync=sync, tensors=tensor_table(model, sync), trainer=dict(trainer), frozen=frozen)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the run's spec"
        raise UsageError(f"{where}: {problem['msg']}") from error


def _own(usual: SyncSettings, model: nn.Module) -> SyncSpec:
    """As this learner would have it; says what nobody has decided."""
    log, fitted = structlog.get_logger(), fitting(usual, model)
    if fitted.fragments < usual.fragments:
        detail = f"the model has {fitted.fragments} trained tensors, and each fragment needs one"
        log.info("fragments_reduced", fragments=fitted.fragments, detail=detail)
    if "tokens" not in usual.model_fields_set:
        detail = f"nobody has set the run's budget: it ends at {usual.tokens} trained tokens, as usual"
        log.info("budget_assumed", tokens=usual.tokens, detail=f"{detail} (tokens=, DILOCO_TOKENS, --tokens)")
    return fitted.sync_spec()
