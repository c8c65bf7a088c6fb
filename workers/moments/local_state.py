"""What both threads of a learner have of its moments. Nothing of it is replaced; each part says who may call it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.settings import STATE_S
from diloco.workers.moments.copies import CopyRequests
from diloco.workers.moments.optimizer_state import Optimizers, OptimizerState, recoverable_state, several
from diloco.workers.moments.state_folder import RunIdentity, StateFolder

Recover = Literal["auto", "peer", "fresh"]


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """What a learner recovers from, and what it leaves behind."""

    recover: Recover = "auto"
    """auto: own checkpoint, then what the optimizer has, then a peer, then fresh; peer: from one first, and from no
    checkpoint; fresh: none of them."""
    state_dir: Path | None = None
    """A folder of this learner's own; None: nothing is saved."""
    state_every_s: float = STATE_S
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
    """The optimizers', to copy and to put back; None: there is none that can be. The training thread's, but for its
    `kind` and for checks of what was found."""
    held: bool
    """The optimizer had moments as the learner joined: it has stepped, or somebody has loaded its state."""
    folder: StateFolder | None
    """Read by the exchange thread while it joins, written for the training thread afterwards."""
    copies: CopyRequests = field(default_factory=CopyRequests)

    def identity(self, state: RunState | None) -> RunIdentity | None:
        """Which run of that name; None: not known yet. A resumed one is that of its first part, under any name."""
        if state is None:
            return None
        return RunIdentity(run=self.run, started_unix_s=state.began_unix_s)


def own_moments(
    model: nn.Module,
    optimizers: Optimizers | None,
    layout: Layout,
    *,
    run: str,
    learner: str,
    incarnation: str,
    options: RecoveryOptions,
    make_folder: Callable[[Path, Layout], StateFolder] = StateFolder,
) -> OwnMoments:
    """Those of this model's inner optimizers, which forget what they have if they are to begin fresh.

    layout: of the trained tensors. make_folder: called with where it is, and what is kept there.

    Raises:
        UsageError: some have stepped, are to begin fresh, and keep what cannot be emptied.
    """
    given = several(optimizers)
    state, held = recoverable_state(model, given, layout), any(map(has_moments, given))
    if options.recover == "fresh" and held:
        if state is None:
            names = ", ".join(type(one).__qualname__ for one in given)
            raise UsageError(
                f"recover='fresh': {names} has stepped, and what it keeps cannot be emptied "
                "safely: make it anew, and load no state into it"
            )
        for one in given:
            one.state.clear()
        held = False
    kept = layout if state is None else state.layout
    folder = None if options.state_dir is None else make_folder(options.state_dir, kept)
    return OwnMoments(run, learner, incarnation, kept, options, state, held, folder)


def has_moments(optimizer: torch.optim.Optimizer) -> bool:
    """It goes on from earlier steps. Some have a state before the first one, with 0 as its `step`."""
    kept = [state for state in optimizer.state.values() if isinstance(state, dict) and state]
    return any(float(state.get("step", 1)) > 0 for state in kept)
