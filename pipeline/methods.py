"""The settings that the name of a method stands for. Pure.

A method is a named set of settings; settings that are given explicitly override it. docs/reference/methods.md lists
where each method differs from its paper. Learners never wait, whatever the method; only the lab can make them wait
(`studies/diloco_studies/quality/settings.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import fragments_of

SyncMethod = Literal["decoupled", "paper", "streaming", "diloco"]
RunMethod = Literal["decoupled", "paper", "streaming", "diloco", "data-parallel"]

# A quorum that stands for the number of learners.
ALL = "all"


@dataclass(frozen=True, slots=True)
class Method:
    """One method."""

    about: str
    """A description, for help texts."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings that it stands for; a quorum may be `ALL`."""
    unpublished: str = ""
    """Constants that its paper does not give, and the values used for them."""


_TOGETHER = {
    **{"quorum": ALL, "grace_gamma": 0.0, "merge": "mean"},
    **{"outer": "nesterov", "outer_momentum": 0.9, "outer_warmup": 0, "first_interval": 0},
}

METHODS: dict[str, Method] = {
    "decoupled": Method("the defaults"),
    "paper": Method(
        "arXiv:2604.21428 as published, RDA with the mean on embeddings, Nesterov, P = H = 24 (P as many as the model "
        "has tensors, if fewer), fixed H: neither warm-up nor longer rounds",
        {
            **{"fragments": 24, "sync_interval": 24, "overlap_steps": 2, "quorum": 1, "codec": "bf16"},
            **{"merge": "rda", "weights": "tokens", "outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9},
            **{"outer_warmup": 0, "first_interval": 0, "stretch": False},
        },
        "outer rate and momentum (DiLoCo's 0.7 and 0.9 are used), gamma and the decay of the averages in the grace "
        "(ours are used), the granularity of RDA (one tensor)",
    ),
    "streaming": Method(
        "as Streaming DiLoCo, all learners in each merge, Nesterov 0.4/0.9", {**_TOGETHER, "outer_lr": 0.4}
    ),
    "diloco": Method(
        "as synchronous DiLoCo, the whole model at once, all learners in each merge, Nesterov 0.7/0.9",
        {**_TOGETHER, "outer_lr": 0.7, "fragments": 1, "overlap_steps": 0},
    ),
    "data-parallel": Method("baseline: gradients are averaged at every step"),
}

# Defaults that differ with outer=nesterov (docs/results/quality.md).
NESTEROV = {"outer_momentum": 0.5, "outer_warmup": 24}


def settings_of(method: str, learners: int | None, tensors: int | None = None) -> dict[str, Any]:
    """Return the settings that a method stands for in a run.

    Args:
        method: its name.
        learners: how many the run has; None if unknown here.
        tensors: how many trained tensors the model has (each fragment needs at least one); None if unknown here.

    Raises:
        UsageError: the method merges all learners, and their number is unknown.
    """
    meant = dict(METHODS[method].settings)
    if meant.get("quorum") == ALL:
        if learners is None:
            raise UsageError(f"method={method} merges all learners: set quorum= to their number")
        meant["quorum"] = learners
    if tensors is not None and "fragments" in meant:
        meant["fragments"] = fragments_of(meant["fragments"], tensors)
    return meant


def matching_method(sync: Mapping[str, Any], tensors: int) -> RunMethod:
    """Return the method whose settings a run has, quorum aside; "decoupled" if there is none.

    tensors: how many trained tensors its model has.
    """
    for name in get_args(RunMethod):
        meant = settings_of(name, sync["quorum"], tensors)
        if meant and all(sync[key] == value for key, value in meant.items() if key != "quorum"):
            return name  # type: ignore[no-any-return]  # a RunMethod
    return "decoupled"
