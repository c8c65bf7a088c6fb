"""What both threads of a learner have of its moments. Nothing of it is replaced; each part says who may call it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.run import RunState
from diloco.workers.moments.copies import CopyRequests
from diloco.workers.moments.optimizer_state import OptimizerState, recoverable_state
from diloco.workers.moments.state_folder import RunIdentity, StateFolder

Recover = Literal["auto", "peer", "fresh"]


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """What a learner recovers from, and what it leaves behind."""

    recover: Recover = "auto"
    """auto: own checkpoint, then a peer, then fresh; peer: no checkpoint; fresh: neither."""
    state_dir: Path | None = None
    """A folder of this learner's own; None: nothing is saved."""
    state_every_s: float = 30.0
    log_losses: bool = False
    """Append every step's loss to `losses.jsonl` in `state_dir`."""


@dataclass(frozen=True, slots=True)
class OwnMoments:
    """One incarnation's. `Recovery` is the exchange thread's way to them, `Keeper` the training thread's."""

    run: str
    learner: str
    incarnation: str
    layout: Layout
    options: RecoveryOptions
    state: OptimizerState | None
    """The optimizer's, to copy and to put back; None: there is none that can be. The training thread's, but for its
    `kind` and for checks of what was found."""
    folder: StateFolder | None
    """Read by the exchange thread while it joins, written for the training thread afterwards."""
    copies: CopyRequests = field(default_factory=CopyRequests)

    def identity(self, state: RunState | None) -> RunIdentity | None:
        """Which run of that name; None: not known yet."""
        return None if state is None else RunIdentity(run=self.run, started_unix_s=state.started_unix_s)


def own_moments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    layout: Layout,
    *,
    run: str,
    learner: str,
    incarnation: str,
    options: RecoveryOptions,
) -> OwnMoments:
    """Those of this model's inner optimizer."""
    folder = None if options.state_dir is None else StateFolder(options.state_dir, layout)
    return OwnMoments(run, learner, incarnation, layout, options, recoverable_state(model, optimizer, layout), folder)
