"""Copy the losses of a learner's steps from its device without waiting.

Reading a loss on a CUDA device waits for everything queued before it, and the loop, or a graph that it has compiled,
may overwrite the tensor meanwhile. So the training thread queues a copy at once, in order with its step (`loss_copy`).
The exchange thread shows the newest loss that has arrived. Only the writer of `losses.jsonl` waits for any.
"""

from collections import deque
from typing import Protocol

import torch

from diloco.workers.copies.snapshots import Snapshot, snapshot_of
from diloco.workers.parameters import local_of


class Loss(Protocol):
    """The loss of one step, perhaps still on its way to host memory. Any thread may use it."""

    def ready(self) -> bool:
        """Return True if `number` would not wait."""

    def number(self) -> float:
        """Return the loss; may wait for a device.

        Raises:
            RuntimeError: it is lost; `ready` may raise this too.
        """


def loss_copy(told: float | torch.Tensor) -> Loss:
    """Return the loss of a torch step as it is now, for the training thread, which waits for no CUDA device.

    told: a number, or a tensor of one element.
    """
    here = local_of(told) if isinstance(told, torch.Tensor) else told
    if isinstance(here, torch.Tensor) and here.is_cuda:
        return snapshot_of(here)
    return Snapshot(torch.tensor(float(here), dtype=torch.float64, device="cpu"))


class Losses:
    """The losses of one learner, of which the newest that has arrived is shown."""

    def __init__(self) -> None:
        self._shown: float | None = None
        # Losses that are newer than the shown one. Only the training thread changes the deque. There are few, since no
        # loop gets far ahead of its device.
        self._under_way: deque[Loss] = deque()

    def add(self, loss: Loss) -> None:
        """Add the loss of the step just made. For the training thread."""
        self._under_way.append(loss)
        there = True
        while there and self._under_way:
            there, self._shown = _seen(self._under_way[0], self._shown)
            if there:
                self._under_way.popleft()

    def shown(self) -> float | None:
        """Return the newest loss that has arrived, without waiting; None: there is none. Any thread may call it."""
        shown = self._shown
        for loss in self._under_way.copy():  # atomic under the interpreter's lock: the training thread changes it
            there, shown = _seen(loss, shown)
            if not there:
                break
        return shown


def _seen(loss: Loss, before: float | None) -> tuple[bool, float | None]:
    """Return whether a loss has arrived or is lost, and the number to show then."""
    try:
        return (True, loss.number()) if loss.ready() else (False, before)
    except Exception:  # lost with its device, which the loop notices on its own, or with an array that was donated
        return True, before
