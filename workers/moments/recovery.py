"""Recover a learner: the run's heads, then moments from its own checkpoint, from a peer, or fresh ones.

docs/explanation/recovery.md ("A learner comes back") gives the order of the sources and what a checkpoint restores.
All of this is part of joining, and runs in the exchange thread. The training thread restores what was found, and keeps
it from then on (`keeper`).
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import structlog
import torch

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.moments import MAX_OFFERED_BYTES
from diloco.pipeline.messages.run import RunState
from diloco.workers.moments.local_state import OwnMoments
from diloco.workers.moments.optimizer_state import OptimizerState, StateCopy
from diloco.workers.moments.peers import Peers
from diloco.workers.moments.saved_moments import Moments, check, offered_bytes
from diloco.workers.moments.state_folder import RunIdentity, SavedState, StateFolder, StateRefused

Source = Literal["start", "checkpoint", "optimizer", "peer", "fresh"]


@dataclass(slots=True)
class FoundMoments:
    """The moments that were found, and their source. The exchange thread makes it, the training thread takes it."""

    source: Source
    moments: Moments | None = None
    """Set to None when they are restored, since a reference to this object may live as long as the learner."""
    saved: SavedState | None = None
    """The rest of the checkpoint that the moments are from."""


class Recovery:
    """Finds one learner's moments as it joins, and has them copied for peers. Used by the exchange thread only."""

    def __init__(self, own: OwnMoments) -> None:
        self._own = own

    async def find(self, peers: Peers | None, versions: tuple[int, ...], state: RunState | None) -> FoundMoments:
        """Choose a source of moments while joining, and fetch them; never raises because there are none."""
        start = max(versions) == 0
        if start and not self._own.options.state:
            return FoundMoments("start")
        found = await self._look(None if start else peers, state)
        if start and found.moments is None:
            found.source = "start"
        structlog.get_logger().info("moments_recovered", learner=self._own.learner, source=found.source)
        return found

    async def _look(self, peers: Peers | None, state: RunState | None) -> FoundMoments:
        own, recover = self._own, self._own.options.recover
        if recover == "fresh":
            return FoundMoments("fresh")
        here = FoundMoments("optimizer" if own.held else "fresh")
        if own.state is None:
            return here
        if own.folder is not None and recover == "auto":
            try:
                loaded = await asyncio.to_thread(_load, own.folder, own.identity(state), own.state)
            except StateRefused as error:
                structlog.get_logger().warning("state_refused", learner=self._own.learner, reason=str(error))
            else:
                if loaded is not None:
                    saved, moments = loaded
                    if own.state.kind.optimizer:
                        return FoundMoments("checkpoint", moments, saved)
                    return replace(here, saved=saved)  # it has only the states of objects
        if own.held and recover == "auto":
            return here
        asked = None if peers is None else await peers.ask()
        return here if asked is None else FoundMoments("peer", asked)

    def peers(self, bus: Bus, clock: Clock, chunk_bytes: int, state: Callable[[], RunState | None]) -> Peers | None:
        """Return the means to exchange moments with peers; None if that is of no use.

        It is of no use if peers cannot give and take all that this optimizer needs, or if its moments are too large to
        go through the bus in the time that anybody waits.

        state: see `Peers`.
        """
        own = self._own
        if own.state is None or not own.state.for_peers:
            return None
        if (size := offered_bytes(own.layout, own.state.kind)) > MAX_OFFERED_BYTES:
            structlog.get_logger().info(
                "moments_too_large_for_peers",
                learner=own.learner,
                bytes=size,
                most=MAX_OFFERED_BYTES,
                instead="its own from --state-dir, otherwise fresh ones with the ramp",
            )
            return None
        return Peers(bus, clock, own.learner, own.layout, own.state.kind, chunk_bytes, state)

    async def copy(self) -> Moments | None:
        """Return a copy of the moments, once the training thread has made it; None: it cannot make one."""
        copy = await self._own.ask_copy()
        return None if copy is None else await asyncio.to_thread(self._checked, copy)

    def _checked(self, copy: StateCopy) -> Moments:
        moments = copy.moments()
        check(moments, self._own.layout)
        return moments


def torch_rng(saved: SavedState) -> torch.Tensor:
    """Return the saved state of torch's CPU generator."""
    return torch.tensor(list(saved.torch_rng), dtype=torch.uint8, device="cpu")


def _load(folder: StateFolder, identity: RunIdentity | None, own: OptimizerState) -> tuple[SavedState, Moments] | None:
    """Return what was saved, if all of it can be restored; None if nothing was saved.

    Raises:
        StateRefused: it cannot be restored.
    """
    found = folder.load(identity, own.kind)
    if found is not None:
        saved, moments = found
        try:
            own.check(moments)
            torch.Generator(device="cpu").set_state(torch_rng(saved))
            random.Random().setstate(saved.python_rng)
        except BadPayload as error:
            raise StateRefused(f"{folder.path} does not fit this optimizer: {error}") from error
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise StateRefused(f"{folder.path} has no random state that can be restored: {error}") from error
    return found
