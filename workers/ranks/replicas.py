"""Checks that ranks which hold the same parameters train them alike: a loop may forget to average its gradients.

Nothing else would reveal it: each fragment is published by one of the replicas, so what is published would be a mixture
of several models. After certain steps each rank copies a few rows of the tensors that all ranks hold whole, and rank 0
compares them beside the training. With averaged gradients replicas agree to the last bit, or nearly; without, they
differ by about the length of a step. Shards are not compared, since `fully_shard` averages by itself.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import structlog

from diloco.pipeline.fragments import FragmentLayout, Layout, Slot
from diloco.pipeline.messages.wire import AVERAGED
from diloco.workers.background import offload
from diloco.workers.copies.snapshots import Snapshot
from diloco.workers.parameters import FragmentParameters
from diloco.workers.ranks.row_ranges import Shares
from diloco.workers.ranks.wires import Wires

Float32 = npt.NDArray[np.float32]

# Limits of what is compared: the number of tensors that rows are taken from, and the number of elements in total.
TENSORS, ELEMENTS = 8, 4096
# Steps between two comparisons. Before that many steps, comparisons come at the powers of two.
EVERY = 1024
# Replicas count as different if they are apart by more than these shares of a step's length and of the values' norm:
# rounding does not cause so much.
APART, ROUNDING = 0.1, 1e-6
REMEDY = (
    "replicas of one model are not trained alike, so what is published is a mixture of several: wrap the model in "
    "DistributedDataParallel, or average every gradient over the ranks (all_reduce) before each optimizer step, and "
    "give all ranks' optimizers the same settings"
)


def sampled(shares: Shares) -> Layout | None:
    """Return a one-fragment layout of some rows of the tensors that all ranks hold whole; None without such tensors."""
    alike = {
        slot.tensor.name: slot.tensor
        for fragment in shares.layout.fragments
        for slot in fragment.slots
        if slot.tensor.rule not in AVERAGED and shares.is_whole(slot.tensor.name)
    }
    # Halved, because two vectors travel in one message, which may be as large as the largest fragment.
    room = min(ELEMENTS, max(fragment.elements for fragment in shares.layout.fragments) // 2)
    slots, at = list[Slot](), 0
    for tensor in list(alike.values())[:: -(-len(alike) // TENSORS) or 1]:
        rows = tensor.shape[0] if tensor.shape else 1
        row = tensor.whole.elements // rows
        count = min(rows, max(1, room // TENSORS // row))
        if at + count * row <= room:
            first = (rows - count) // 2
            part = tensor.model_copy(update={"rows": (first, first + count) if count < rows else None})
            slots.append(Slot(part, at, at + count * row))
            at += count * row
    return Layout((FragmentLayout(0, tuple(slots)),), b"") if slots else None


class Samples:
    """One rank's copies of the compared rows. For the training thread."""

    def __init__(self, parameters: FragmentParameters, layout: Layout) -> None:
        """layout: the rows to compare, made by `sampled`."""
        self._some = parameters.some(layout)
        self._before: Snapshot | None = None
        self._failed = False

    def stepped(self, steps: int) -> tuple[Snapshot, Snapshot] | None:
        """Return the copies from before and after step `steps` if a comparison is due, else None. Never raises."""
        before, self._before = self._before, None
        if (_due(steps) or _due(steps + 1)) and not self._failed:
            try:
                self._before = self._some.snapshot(0)
            except Exception as error:  # a mere check must not end the training
                self._failed = True
                structlog.get_logger().warning("replicas_not_compared", error=str(error)[:200])
        return (before, self._before) if _due(steps) and before is not None and self._before is not None else None


def _due(steps: int) -> bool:
    return steps > 0 and (steps % EVERY == 0 or steps & (steps - 1) == 0)


class Replicas:
    """One rank's side in its exchange thread. asyncio."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._said: dict[int, dict[int, Float32]] = {}
        """Maps a step and a rank to the values (2, elements) before and after the step; used at rank 0."""
        self._apart = False
        wires.handle(sampled=self._take)

    def compare(self, steps: int, before: Snapshot, now: Snapshot) -> None:
        """Send the copies of a step to rank 0, which compares them."""
        self._wires.go_on(self._send(steps, before, now))

    async def _send(self, steps: int, before: Snapshot, now: Snapshot) -> None:
        both = await offload(lambda: np.concatenate([before.numpy(), now.numpy()]))
        await self._wires.ask(0, "sampled", steps, vector=both)

    async def _take(self, rank: int, steps: int, vector: Float32) -> None:
        self._said.setdefault(steps, {})[rank] = vector.reshape(2, -1)
        if len(self._said[steps]) < self._wires.ranks:
            return
        ranks = apart(self._said.pop(steps))
        if ranks and not self._apart:
            structlog.get_logger().error("replicas_apart", steps=steps, ranks=[0, *ranks], detail=REMEDY)
        self._apart = bool(ranks)


def apart(said: Mapping[int, Float32]) -> Sequence[int]:
    """Return the ranks whose values differ from rank 0's. said: by rank, (2, elements) before and after a step."""
    before, now = said[0].astype(np.float64)
    least = max(APART * np.linalg.norm(now - before), ROUNDING * np.linalg.norm(now))
    return [rank for rank in sorted(said) if np.linalg.norm(said[rank][1] - now) > least]
