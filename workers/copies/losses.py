"""The losses of a learner's steps, on their way from the device that trains.

To read one there is to wait for all that was queued before it, and the loop may write over it meanwhile, or a graph
that it has compiled. So the training thread copies it at once, in order with its step (`LossCopy`). The exchange thread
shows the newest one that is there. Nobody waits for any but the writer of `losses.jsonl`.
"""

from collections import deque
from typing import Protocol

import torch

from diloco.workers.copies.snapshots import Snapshot, snapshot_of
from diloco.workers.parameters import local_of


class Loss(Protocol):
    """Of one step, perhaps still on its way to host memory. Of any thread."""

    def ready(self) -> bool:
        """True if `number` would not wait."""

    def number(self) -> float:
        """May wait for a device.

        Raises:
            RuntimeError: it is lost; `ready` may say so too.
        """


class LossCopy:
    """That of a torch step, as it was told. Made by the training thread, which waits where its device is not CUDA."""

    def __init__(self, told: float | torch.Tensor) -> None:
        """told: of one element."""
        here = local_of(told) if isinstance(told, torch.Tensor) else told
        self._copy: Snapshot | None = None
        self._number = 0.0
        if isinstance(here, torch.Tensor) and here.is_cuda:
            self._copy = snapshot_of(here)
        else:
            self._number = float(here)

    def ready(self) -> bool:
        """As `Loss`."""
        copy = self._copy
        return copy is None or copy.ready()

    def number(self) -> float:
        """As `Loss`."""
        copy = self._copy
        if copy is not None:
            self._number, self._copy = float(copy.tensor()), None  # its memory is for a later one
        return self._number


class Losses:
    """One learner's, of which the newest that is there is shown."""

    def __init__(self) -> None:
        self._shown: float | None = None
        self._under_way: deque[Loss] = deque()
        """Those told since, the training thread's to change: few, since no loop gets far ahead of its device."""

    def tell(self, loss: Loss) -> None:
        """Of the step just made. The training thread's."""
        self._under_way.append(loss)
        there = True
        while there and self._under_way:
            there, self._shown = _seen(self._under_way[0], self._shown)
            if there:
                self._under_way.popleft()

    def shown(self) -> float | None:
        """The newest that is there; None: there was none. Waits for nothing. Of any thread."""
        shown = self._shown
        for loss in self._under_way.copy():  # under the interpreter's lock: the training thread changes it meanwhile
            there, shown = _seen(loss, shown)
            if not there:
                break
        return shown


def _seen(loss: Loss, before: float | None) -> tuple[bool, float | None]:
    """Whether it is there, or lost; and what is to be shown."""
    try:
        return (True, loss.number()) if loss.ready() else (False, before)
    except Exception:  # with its device, as the loop hears itself; or with an array that was donated
        return True, before
