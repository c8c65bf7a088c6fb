"""What the name of a method means, wherever one is asked for. Pure.

A method is a name for settings: what is set besides it has the last word. Where each one differs from its paper stands
in docs/reference/methods.md. Learners never wait, whatever the method; the lab can have them wait too
(`studies/diloco_studies/quality/settings.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import fragments_of

SyncMethod = Literal["decoupled", "paper", "streaming", "diloco"]
RunMethod = Literal["decoupled", "paper", "streaming", "diloco", "data-parallel"]

ALL = "all"
"""A quorum of as many as there are learners."""


@dataclass(frozen=True, slots=True)
class Method:
    """One method."""

    about: str
    """What it is, for help."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that it means; `ALL` as a quorum."""
    unpublished: str = ""
    """Which of its constants its paper does not give, and what is taken for them."""


_TOGETHER = {
    **{"quorum": ALL, "grace_gamma": 0.0, "merge": "mean"},
    **{"outer": "nesterov", "outer_momentum": 0.9, "outer_warmup": 0, "first_interval": 0},
}

METHODS: dict[str, Method] = {
    "decoupled": Method("the defaults"),
    "paper": Method(
        "arXiv:2604.21428 as published, RDA with the mean on embeddings, Nesterov, P = H = 24 (P as many as the model "
        "has tensors, if fewer), H as it is: neither warm-up nor longer rounds",
        {
            **{"fragments": 24, "sync_interval": 24, "overlap_steps": 2, "quorum": 1, "codec": "bf16"},
            **{"merge": "rda", "weights": "tokens", "outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9},
            **{"outer_warmup": 0, "first_interval": 0, "stretch": False},
        },
        "outer rate and momentum (taken: DiLoCo's 0.7 and 0.9), gamma and the averages' decay in the "
        "grace (ours), the granularity of RDA (a tensor)",
    ),
    "streaming": Method(
        "as Streaming DiLoCo, all learners in each merge, Nesterov 0.4/0.9", {**_TOGETHER, "outer_lr": 0.4}
    ),
    "diloco": Method(
        "as synchronous DiLoCo, the whole model at once, all learners in each merge, Nesterov 0.7/0.9",
        {**_TOGETHER, "outer_lr": 0.7, "fragments": 1, "overlap_steps": 0},
    ),
    "data-parallel": Method("the baseline that averages gradients at every step"),
}


def settings_of(method: str, learners: int | None, tensors: int | None = None) -> dict[str, Any]:
    """Settings that a method means in a run.

    Args:
        method: its name.
        learners: of the run; None: not known here.
        tensors: trained ones of the model, of which each fragment needs one; None: not known here.

    Raises:
        UsageError: all learners are to be in each merge, and nobody says how many there are.
    """
    meant = dict(METHODS[method].settings)
    if meant.get("quorum") == ALL:
        if learners is None:
            raise UsageError(f"method={method} has all learners in each merge: say how many there are by quorum=")
        meant["quorum"] = learners
    if tensors is not None and "fragments" in meant:
        meant["fragments"] = fragments_of(meant["fragments"], tensors)
    return meant


def meant_by(sync: Mapping[str, Any], tensors: int) -> RunMethod:
    """The method that means what a run's settings are, whatever its quorum; "decoupled" if none does.

    tensors: trained ones of its model.
    """
    for name in get_args(RunMethod):
        meant = settings_of(name, sync["quorum"], tensors)
        if meant and all(sync[key] == value for key, value in meant.items() if key != "quorum"):
            return name  # type: ignore[no-any-return]  # one of them
    return "decoupled"
