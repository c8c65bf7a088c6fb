"""Copy the losses of a learner's steps from its device without waiting.

Reading a loss on a CUDA device waits for everything queued before it, and the loop, or a graph that it has compiled,
may overwrite the tensor meanwhile. So the training thread queues a copy at once, in order with its step (`loss_copy`).
The exchange thread reports the newest loss that has arrived, and a curve of all of them. Only the writer of
`losses.jsonl` waits for any.
"""

import math
from base64 import b64encode
from collections import deque
from typing import Protocol

import numpy as np
import torch

from diloco.pipeline.messages.run import MAX_CURVE
from diloco.pipeline.messages.wire import MAX_LOSS
from diloco.workers.copies.snapshots import Snapshot, snapshot_of
from diloco.workers.parameters import local_of

# Length of a bucket of the curve at first, in seconds.
BUCKET_S = 0.25


class Loss(Protocol):
    """The loss of one step, perhaps still on its way to host memory. Any thread may use it."""

    def ready(self) -> bool:
        """Return True if `number` would not block."""

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
    """The losses of one learner: the newest one that has arrived, and their means over time."""

    def __init__(self) -> None:
        self._shown: float | None = None
        # Losses that are newer than the shown one. Only the training thread changes the deque. There are few, since no
        # loop gets far ahead of its device.
        self._under_way: deque[Loss] = deque()
        # Length of a bucket in seconds, and the mean loss in each; NaN without a step whose loss is finite and at most
        # `MAX_LOSS`. The pair is replaced as a whole, since the exchange thread reads it.
        self._curve: tuple[float, list[float]] = BUCKET_S, []
        self._count = 0  # losses in the last bucket's mean

    def add(self, loss: Loss, at_s: float) -> None:
        """Add the loss of the step just made, `at_s` seconds after training began. For the training thread."""
        self._under_way.append(loss)
        while self._under_way:
            there, number = _seen(self._under_way[0], None)
            if not there:
                break
            self._under_way.popleft()
            if number is not None:
                self._shown = number
                self._draw(at_s, number)

    def _draw(self, at_s: float, loss: float) -> None:
        every_s, means = self._curve
        while (bucket := int(at_s / every_s)) >= MAX_CURVE:  # twice the length, so half as many
            means = [_mean(means[at : at + 2]) for at in range(0, len(means), 2)]
            every_s *= 2
            self._curve, self._count = (every_s, means), 1
        means.extend([math.nan] * (bucket + 1 - len(means)))
        if abs(loss) <= MAX_LOSS:  # False for NaN
            self._count = 1 if math.isnan(means[-1]) else self._count + 1
            means[-1] = loss if self._count == 1 else means[-1] + (loss - means[-1]) / self._count

    def shown(self) -> float | None:
        """Return the newest loss that has arrived, without waiting; None: there is none. Any thread may call it."""
        shown = self._shown
        for loss in self._under_way.copy():  # atomic under the interpreter's lock: the training thread changes it
            there, shown = _seen(loss, shown)
            if not there:
                break
        return shown

    def curve(self) -> tuple[float, str]:
        """Return `LearnerReport.curve_s` and `LearnerReport.curve`. Any thread may call it."""
        every_s, means = self._curve
        return every_s, b64encode(np.array(means.copy(), "<f4").tobytes()).decode()


def _mean(losses: list[float]) -> float:
    there = [loss for loss in losses if not math.isnan(loss)]
    return sum(there) / len(there) if there else math.nan


def _seen(loss: Loss, before: float | None) -> tuple[bool, float | None]:
    """Return whether a loss has arrived or is lost, and the number to show then."""
    try:
        return (True, loss.number()) if loss.ready() else (False, before)
    except Exception:  # lost with its device, which the loop notices on its own, or with an array that was donated
        return True, before
