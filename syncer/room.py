"""Memory for what an outer step makes, and its payloads while it does. Pure: numpy only."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pipeline.buffers import take
from pipeline.chunks import Payload
from pipeline.codec import as_bytes
from pipeline.halves import Halves
from pipeline.spec_messages import SyncSpec
from pipeline.updates import Coded, Updating

from .merge import Sum

Float32 = npt.NDArray[np.float32]


class Room:
    """Memory for the values and the momentum after an outer step, and the digests of what is there already.

    theta, momentum: (elements,) float32, written from front to back; momentum is None for plain SGD.
    """

    def __init__(self, elements: int, sync: SyncSpec) -> None:
        self._chunk_bytes = sync.chunk_bytes
        self.theta = take(elements, np.float32)
        self.payload = Payload(as_bytes(self.theta), sync.chunk_bytes)
        self.halves = Halves(elements, sync.chunk_bytes) if sync.global_codec == "bf16" else None
        self.update = Updating(elements, sync.chunk_bytes) if sync.global_codec == "int8" else None
        self.merged: Coded | None = None
        """The pseudogradient as it is merged, where the update does not tell it."""
        self.momentum: Float32 | None = None
        self.momentum_payload: Payload | None = None
        self.more: Callable[[], object] = lambda: None
        """Called after each block."""
        self.sum: Sum | None = None
        """What of the merge was summed in `theta` already."""

    def gather(self, outer_momentum: float, orthogonal: bool = False) -> None:
        """Have memory for the momentum too, unless this is 0: plain SGD. orthogonal: so is the step."""
        if orthogonal and self.update is not None and self.merged is None:
            self.merged = Coded(len(self.theta), self._chunk_bytes)
        if outer_momentum > 0 and self.momentum is None:
            self.momentum = take(len(self.theta), np.float32)
            self.momentum_payload = Payload(as_bytes(self.momentum), self._chunk_bytes)

    def begin(self, theta: Float32, momentum: Float32 | None, lr: float, mu: float) -> None:
        """The step is one from these values and this momentum (None: zeros), each (elements,)."""
        if self.update is None:
            return
        followed = None
        if self.momentum is not None and self.merged is None:
            followed = momentum, self.momentum, lr, mu
        self.update.begin(theta, followed)

    def reduced(self) -> None:
        """All of the pseudogradient is in `theta`; an orthogonalised step is one of what its code stands for."""
        if self.merged is not None:
            self.merged.replace(self.theta)
            self.more()

    def written(self, stop: int) -> None:
        """All elements before `stop` are as the outer step makes them: values, or with an update the steps to them."""
        if self.update is not None:
            stop = self.update.stepped(self.theta, stop)
        self.payload.written(self.theta.itemsize * stop)
        if self.halves is not None:
            self.halves.written(self.theta, stop)
        if self.momentum_payload is not None:
            self.momentum_payload.written(self.theta.itemsize * stop)
        self.more()
