"""A learner's own moments, as both of its threads see them. No part is replaced; each says which thread may use it."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.settings import STATE_S
from diloco.workers.moments.optimizer_state import Optimizers, OptimizerState, StateCopy, recoverable_state, several
from diloco.workers.moments.state_folder import RunIdentity, StateFolder
from diloco.workers.moments.stateful import Stateful

Recover = Literal["auto", "peer", "fresh"]


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """Where a learner recovers its moments from, and what it saves."""

    recover: Recover = "auto"
    """auto: the own checkpoint, then what the optimizer has, then a peer, then fresh; peer: a peer first, and no
    checkpoint; fresh: none of them."""
    state_dir: Path | None = None
    """A folder that belongs only to this learner; None: nothing is saved."""
    state_every_s: float = STATE_S
    log_losses: bool = False
    """Append every step's loss to `losses.jsonl` in `state_dir`."""
    state: Mapping[str, Stateful] = field(default_factory=dict)
    """Objects whose state is saved too, by name."""


@dataclass(frozen=True, slots=True)
class OwnMoments:
    """One incarnation's moments. The exchange thread reaches them by `Recovery`, the training thread by `Keeper`."""

    run: str
    learner: str
    incarnation: str
    layout: Layout
    options: RecoveryOptions
    state: OptimizerState | None
    """Copies and restores the optimizers' state; None: there is none, or it cannot be copied. It belongs to the
    training thread, except `kind` and the checks of what was found."""
    held: bool
    """True if the optimizer had moments when the learner joined: it has stepped, or its state was loaded."""
    folder: StateFolder | None
    """The exchange thread reads it while the learner joins; afterwards it is written for the training thread."""
    copies: "deque[Future[StateCopy | None]]" = field(default_factory=deque)
    """Copies that were asked for. No lock is needed: both threads use only single operations, which are atomic."""

    async def ask_copy(self) -> StateCopy | None:
        """Return a copy, once the training thread has made it; None: it cannot make one. For the exchange thread."""
        asked: Future[StateCopy | None] = Future()
        self.copies.append(asked)
        return await asyncio.wrap_future(asked)

    def answer_copies(self, copy: StateCopy | None) -> None:
        """Answer all requests with this copy; None: there is none to give. For the training thread."""
        while self.copies:
            asked = self.copies.popleft()
            if asked.set_running_or_notify_cancel():  # the request may have been cancelled meanwhile
                asked.set_result(copy)

    def identity(self, state: RunState | None) -> RunIdentity | None:
        """Return which of the runs of that name this is; None: not known yet.

        A resumed run has the identity of its first part, whatever its name.
        """
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
    """Return the moments of this model's inner optimizers; optimizers that must begin fresh are emptied.

    Args:
        layout: of the trained tensors.
        make_folder: called with the folder's path, and the layout of what is kept there.

    Raises:
        UsageError: optimizers that must begin fresh have stepped, and their state cannot be emptied safely.
    """
    given = several(optimizers)
    state, held = recoverable_state(model, given, layout), any(map(has_moments, given))
    if options.recover == "fresh" and held:
        if state is None:
            names = ", ".join(type(one).__qualname__ for one in given)
            raise UsageError(
                f"recover='fresh': {names} has stepped, and its state cannot be cleared safely: create a new "
                "optimizer, and do not load state into it"
            )
        for one in given:
            one.state.clear()
        held = False
    if state is None and options.state:
        state = OptimizerState(model, [], layout)  # saves nothing of the optimizers
    kept = layout if state is None else state.layout
    folder = None if options.state_dir is None else make_folder(options.state_dir, kept)
    return OwnMoments(run, learner, incarnation, kept, options, state, held, folder)


def has_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer continues from earlier steps.

    Some optimizers have a state before the first step, with 0 as its `step`.
    """
    kept = [state for state in optimizer.state.values() if isinstance(state, dict) and state]
    return any(float(state.get("step", 1)) > 0 for state in kept)
