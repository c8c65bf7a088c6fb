"""Make the spec that a learner proposes, from its model and settings."""

import structlog
from pydantic import ValidationError

from diloco.pipeline.agreement import WAITING_SYNCER, agree
from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.settings import SyncSettings, load
from diloco.pipeline.sources import ENV_PREFIX
from diloco.pipeline.wrong_values import format_problem
from diloco.workers.checks.arguments import Arguments
from diloco.workers.exchange.redis_access import FirstSpecSettings
from diloco.workers.proposed import Proposed


def fitting(sync: SyncSettings, model: Proposed) -> SyncSettings:
    """Return the settings as their method has them, with no more fragments than the model can fill, unless somebody
    asked for a number.
    """
    # `proposal` asks for a quorum if the method needs one: until then a waiting syncer may know it.
    sync = sync.with_method(sync.quorum)
    if "fragments" in sync.model_fields_set:
        return sync
    return sync.model_copy(update={"fragments": model.fitting_fragments(sync.fragments)})


def proposal(model: Proposed, given: Arguments, held: Spec | None, beginning: FirstSpecSettings) -> Spec:
    """Return the spec to propose to a run without one, or to compare with the spec that a run has.

    It follows the run where the learner has no settings of its own.

    Args:
        model: already checked.
        given: the learner's arguments.
        held: the run's spec; None: it has none. A learner with settings of its own takes only the budget and
            the number of groups from it, each only if it names none.
        beginning: for a run without a spec: the settings of a waiting syncer, and whether Redis is a cluster.

    Raises:
        SpecMismatch: the learner was given a budget that differs from the run's, or settings that differ from the
        waiting syncer's.
        UsageError: model and settings cannot make a run.
    """
    budget = {} if given.tokens is None else {"tokens": given.tokens}
    trainer = given.trainer or {}
    if held is None or given.sync is not None:
        asked = (given.sync or load(SyncSettings)).model_copy(update=budget)
        if held is not None:
            asked = agree(asked, {"tokens": held.sync.tokens}, SyncSettings)
        elif beginning.wanted:
            judged = load(SyncSettings, beginning.wanted)
            wanted = {name: getattr(judged, name) for name in beginning.wanted}
            asked = agree(asked, wanted, SyncSettings, WAITING_SYNCER)
        asked = asked.with_method()
        if held is not None and asked.groups is None:
            asked = asked.model_copy(update={"groups": held.sync.groups})
        sync = _own(asked, model, beginning.cluster)
    else:
        _warn_ignored_variables(held.sync)
        # A model that is not the run's may have too few tensors for its fragments. The number is reduced here, so that
        # joining can show how the models differ.
        fragments = model.fitting_fragments(held.sync.fragments)
        sync, trainer = held.sync.model_copy(update={"fragments": fragments} | budget), trainer or held.trainer
    frozen = model.frozen() if given.same_frozen else None
    try:
        return Spec(sync=sync, tensors=model.tensor_table(sync), trainer=dict(trainer), frozen=frozen)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the run's spec"
        raise UsageError(f"{where}: {format_problem(problem)}") from error


def _warn_ignored_variables(held: SyncSpec) -> None:
    """Warn of environment variables that differ from the run: only the first party's have an effect."""
    given = load(SyncSettings)
    usual = given.with_method(held.quorum)
    for name in sorted(usual.model_fields_set - {"method"}):
        if (here := getattr(usual, name)) != (there := getattr(held, name)):
            said = name if name in given.model_fields_set else "method"
            variable = f"{ENV_PREFIX}{said.upper()}"
            means = "" if said == name else f"{given.method}: {name} "
            detail = f"{variable} is {means}{here}, but the run was started with {there}, which applies"
            structlog.get_logger().warning("variable_ignored", variable=variable, detail=detail)


def _own(usual: SyncSettings, model: Proposed, cluster: bool) -> SyncSpec:
    """Return the spec settings that this learner would use on its own, and log those left to their defaults."""
    log, fitted = structlog.get_logger(), fitting(usual, model)
    if fitted.fragments < usual.fragments:
        buffers = ", except the one that holds the buffers" * (fitted.fragments > len(model.trained))
        detail = f"the model has {len(model.trained)} trained tensors, and each fragment needs at least one{buffers}"
        log.info("fragments_reduced", fragments=fitted.fragments, detail=detail)
    if "tokens" not in usual.model_fields_set:
        detail = f"the run's budget was not set, so it ends at the default of {usual.tokens} trained tokens"
        log.info("budget_assumed", tokens=usual.tokens, detail=f"{detail} (tokens=, DILOCO_TOKENS, --tokens)")
    return fitted.sync_spec(cluster)
