"""How a learner comes back: the run's heads, then moments from its own checkpoint, else from a peer, else fresh.

Parameters always come from the heads. At the very start of a run (every head at version 0) there is nothing to
recover, and nobody is asked. All of it is part of joining; from the first step on, the training thread only copies
(`stepped`), and other threads write and upload.

Restored with a checkpoint: moments, step counters, torch's CPU and Python's random states (so that a loop that draws
its data from them does not read its first batches again). Not the data position: the run's work queue gives the
rest of a lost shard to whoever comes first, and it must be read once, not twice.
"""

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
import torch
from torch import nn

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.moments import OptimizerKind
from diloco.pipeline.messages.run import RunState
from diloco.workers.exchange.shared import Shared
from diloco.workers.moments.moments import Moments, check
from diloco.workers.moments.optimizer_state import OptimizerState, StateCopy, recoverable_state
from diloco.workers.moments.peers import Peers
from diloco.workers.moments.state_folder import RunIdentity, SavedState, StateFolder, StateRefused
from diloco.workers.rounds import Rounds

Recover = Literal["auto", "peer", "fresh"]
Source = Literal["start", "checkpoint", "peer", "fresh"]

LOSSES_EVERY_S = 0.25
LOSSES_KEPT = 100_000
"""Losses that wait to be written, at most."""


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


class Recovery:
    """One learner's moments: where they come from, who gets a copy."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        layout: Layout,
        rounds: Rounds,
        *,
        run: str,
        learner: str,
        incarnation: str,
        options: RecoveryOptions,
    ) -> None:
        self._layout, self._rounds, self._options = layout, rounds, options
        self._run, self._learner, self._incarnation = run, learner, incarnation
        self._state = recoverable_state(model, optimizer, layout)
        self._folder = None if options.state_dir is None else StateFolder(options.state_dir, layout)
        self.source: Source = "start"
        self.earlier_steps = self.earlier_tokens = 0
        """Of the incarnations before this one."""
        self._found: tuple[SavedState | None, Moments] | None = None
        self._copy: StateCopy | None = None
        """In the making."""
        self._next_save_s = self._next_losses_s = 0.0
        self._wishes: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[StateCopy]]] = deque()
        """Added by the exchange thread, taken by the training thread."""
        self._losses: deque[tuple[int, float, float, float | torch.Tensor]] = deque(maxlen=LOSSES_KEPT)

    # --- the exchange thread ----------------------------------------------------------------------------

    async def find(self, peers: Peers | None, versions: tuple[int, ...], state: RunState | None) -> None:
        """Choose where the moments come from and fetch them, while joining; never raises for want of any."""
        found = None
        if max(versions) > 0:
            self.source = "fresh"
            found = await self._look(peers, state)
            structlog.get_logger().info("moments_recovered", learner=self._learner, source=self.source)
        self._found = found

    async def _look(self, peers: Peers | None, state: RunState | None) -> tuple[SavedState | None, Moments] | None:
        own = self._state
        if own is None or self._options.recover == "fresh":
            return None
        if self._folder is not None and self._options.recover == "auto":
            try:
                saved = await asyncio.to_thread(_load, self._folder, self._identity(state), own)
            except StateRefused as error:
                structlog.get_logger().warning("state_refused", learner=self._learner, reason=str(error))
            else:
                if saved is not None:
                    self.source = "checkpoint"
                    return saved
        moments = None if peers is None else await peers.ask()
        if moments is None:
            return None
        self.source = "peer"
        return None, moments

    def peers(self, bus: Bus, clock: Clock, chunk_bytes: int) -> Peers | None:
        """Dealings with peers; None where this optimizer's moments are of no use to others, nor theirs to it."""
        if self._state is None or not self._state.for_peers:
            return None
        return Peers(bus, clock, self._learner, self._layout, self._state.kind, chunk_bytes)

    async def copy(self) -> Moments:
        """A copy of the moments, once the training thread has made it."""
        loop = asyncio.get_running_loop()
        wish: asyncio.Future[StateCopy] = loop.create_future()
        self._wishes.append((loop, wish))
        return await asyncio.to_thread(self._checked, await wish)

    def _checked(self, copy: StateCopy) -> Moments:
        moments = copy.moments()
        check(moments, self._layout)
        return moments

    def _identity(self, state: RunState | None) -> RunIdentity | None:
        return None if state is None else RunIdentity(run=self._run, started_unix_s=state.started_unix_s)

    # --- the training thread ----------------------------------------------------------------------------

    def restore(self) -> None:
        """Put what was found into the optimizer and this process; before the first step."""
        now = time.monotonic()
        self._next_save_s, self._next_losses_s = now + self._options.state_every_s, now
        if self._found is None or self._state is None:
            return
        (saved, moments), self._found = self._found, None
        self._state.load(moments)
        if saved is not None:
            self.earlier_steps, self.earlier_tokens = saved.steps, saved.tokens
            torch.set_rng_state(_torch_rng(saved))
            random.setstate(saved.python_rng)

    def stepped(self, shared: Shared, progress: float, loss: float | torch.Tensor | None) -> None:
        """A step is done: copy a fragment of the moments if a copy is wanted. Never waits."""
        now = time.monotonic()
        if self._options.log_losses and self._folder is not None:
            if loss is not None:
                self._losses.append((self._rounds.steps, time.time(), progress, loss))
            if now >= self._next_losses_s and not self._folder.busy:
                self._next_losses_s = now + LOSSES_EVERY_S
                self._folder.append_losses(self._loss_lines)
        if self._state is None:
            return
        if self._copy is None:
            due = self._folder is not None and now >= self._next_save_s and not self._folder.busy
            if due or self._wishes:
                self._copy = self._state.start_copy()
        if self._copy is not None and self._copy.advance():
            copy, self._copy = self._copy, None
            self._hand_out(copy)
            if now >= self._next_save_s:
                self._next_save_s = now + self._options.state_every_s
                self._save(self._state.kind, copy, shared)

    def close(self, shared: Shared, save: bool, within_s: float) -> None:
        """Training has ended; save once more if this learner may come back, and wait a while for what is written."""
        if self._folder is None:
            return
        if self._options.log_losses:
            self._folder.append_losses(self._loss_lines)
        if save and self._state is not None and self._rounds.steps:
            copy = self._state.start_copy()
            while not copy.advance():
                pass
            self._save(self._state.kind, copy, shared)
        self._folder.close(within_s)

    def _hand_out(self, copy: StateCopy) -> None:
        while self._wishes:
            loop, wish = self._wishes.popleft()
            loop.call_soon_threadsafe(_answer, wish, copy)

    def _save(self, kind: OptimizerKind, copy: StateCopy, shared: Shared) -> None:
        identity = self._identity(shared.state)
        if self._folder is None or identity is None:
            return
        steps = self.earlier_steps + self._rounds.steps
        tokens, shard = self.earlier_tokens + self._rounds.tokens, shared.shard_position
        torch_rng, python_rng = torch.get_rng_state(), random.getstate()

        def make() -> tuple[SavedState, Moments]:
            moments = copy.moments()
            state = SavedState(
                identity=identity,
                learner=self._learner,
                layout=self._layout.digest,
                kind=kind,
                moments_file=f"moments-{steps}.safetensors",
                numbers=dict(moments.numbers),
                steps=steps,
                tokens=tokens,
                torch_rng=torch_rng.numpy().tobytes(),
                python_rng=python_rng,
                shard=shard,
            )
            return state, moments

        self._folder.save(make)

    def _loss_lines(self) -> list[str]:
        """In the writer's thread: reading a loss may wait for a device."""
        lines = []
        while self._losses:
            step, unix_s, progress, loss = self._losses.popleft()
            line = {
                "incarnation": self._incarnation,
                "step": step,
                "unix_s": unix_s,
                "progress": progress,
                "loss": float(loss),
            }
            lines.append(dumps(line))
        return lines


def _torch_rng(saved: SavedState) -> torch.Tensor:
    return torch.tensor(list(saved.torch_rng), dtype=torch.uint8)


def _load(folder: StateFolder, identity: RunIdentity | None, own: OptimizerState) -> tuple[SavedState, Moments] | None:
    """What was saved, if all of it can be put back; None where nothing was.

    Raises:
        StateRefused: it cannot.
    """
    found = folder.load(identity, own.kind)
    if found is not None:
        saved, moments = found
        try:
            own.check(moments)
            torch.Generator().set_state(_torch_rng(saved))
            random.Random().setstate(saved.python_rng)
        except BadPayload as error:
            raise StateRefused(f"{folder.path} does not fit this optimizer: {error}") from error
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise StateRefused(f"{folder.path} holds no random state that can be set: {error}") from error
    return found


def _answer(wish: "asyncio.Future[StateCopy]", copy: StateCopy) -> None:
    if not wish.done():  # who asked may have given up
        wish.set_result(copy)
