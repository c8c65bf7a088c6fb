"""How a learner comes back: the run's heads, then moments from its own checkpoint, else from a peer, else fresh.

Those of more than `MOST_OFFERED_BYTES` are not asked of a peer.

An optimizer that has moments already, as a trainer loads them with a checkpoint of its own, keeps them where there is
no newer checkpoint of ours.

Parameters always come from the heads. At the very start of a run (every head at version 0) there is nothing to
recover, and nobody is asked. All of it is part of joining, and the exchange thread's. The training thread puts back
what was found, and from then on keeps it (`keeper`).

Restored with a checkpoint: moments, step counters, torch's CPU and Python's random states (so that a loop that draws
its data from them does not read its first batches again). Not the data position: the run's work queue gives the
rest of a lost shard to whoever comes first, and it must be read once, not twice.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog
import torch

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.moments import MOST_OFFERED_BYTES
from diloco.pipeline.messages.run import RunState
from diloco.workers.moments.local_state import OwnMoments
from diloco.workers.moments.moments import Moments, check, offered_bytes
from diloco.workers.moments.optimizer_state import OptimizerState, StateCopy
from diloco.workers.moments.peers import Peers
from diloco.workers.moments.state_folder import RunIdentity, SavedState, StateFolder, StateRefused

Source = Literal["start", "checkpoint", "optimizer", "peer", "fresh"]


@dataclass(slots=True)
class Found:
    """Where the moments come from, and what there is. The exchange thread finds it, the training thread takes it."""

    source: Source
    moments: Moments | None = None
    """Until they are put back: what hands this over may refer to it for the learner's whole life."""
    saved: SavedState | None = None
    """With the moments, of a checkpoint."""


class Recovery:
    """Finds one learner's moments as it joins, and has copies of them made for others. The exchange thread's."""

    def __init__(self, own: OwnMoments) -> None:
        self._own = own

    async def find(self, peers: Peers | None, versions: tuple[int, ...], state: RunState | None) -> Found:
        """Choose where the moments come from and fetch them, while joining; never raises for want of any."""
        if max(versions) == 0:
            return Found("start")
        found = await self._look(peers, state)
        structlog.get_logger().info("moments_recovered", learner=self._own.learner, source=found.source)
        return found

    async def _look(self, peers: Peers | None, state: RunState | None) -> Found:
        own, recover = self._own, self._own.options.recover
        if recover == "fresh":
            return Found("fresh")
        here = Found("optimizer" if own.held else "fresh")
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
                    return Found("checkpoint", moments, saved)
        if own.held and recover == "auto":
            return here
        asked = None if peers is None else await peers.ask()
        return here if asked is None else Found("peer", asked)

    def peers(self, bus: Bus, clock: Clock, chunk_bytes: int, state: Callable[[], RunState | None]) -> Peers | None:
        """Dealings with peers; None where this optimizer's moments are of no use to others, nor theirs to it, or are
        more than goes through the bus in the time that anybody waits. state: as `Peers`.
        """
        own = self._own
        if own.state is None or not own.state.for_peers:
            return None
        if (size := offered_bytes(own.layout, own.state.kind)) > MOST_OFFERED_BYTES:
            structlog.get_logger().info(
                "moments_too_large_for_peers",
                learner=own.learner,
                bytes=size,
                most=MOST_OFFERED_BYTES,
                instead="its own from --state-dir, else fresh with the ramp",
            )
            return None
        return Peers(bus, clock, own.learner, own.layout, own.state.kind, chunk_bytes, state)

    async def copy(self) -> Moments | None:
        """A copy of the moments, once the training thread has made it; None: it cannot make one."""
        copy = await self._own.copies.ask()
        return None if copy is None else await asyncio.to_thread(self._checked, copy)

    def _checked(self, copy: StateCopy) -> Moments:
        moments = copy.moments()
        check(moments, self._own.layout)
        return moments


def torch_rng(saved: SavedState) -> torch.Tensor:
    """State of torch's random numbers on the CPU."""
    return torch.tensor(list(saved.torch_rng), dtype=torch.uint8, device="cpu")


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
            torch.Generator(device="cpu").set_state(torch_rng(saved))
            random.Random().setstate(saved.python_rng)
        except BadPayload as error:
            raise StateRefused(f"{folder.path} does not fit this optimizer: {error}") from error
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise StateRefused(f"{folder.path} holds no random state that can be set: {error}") from error
    return found
