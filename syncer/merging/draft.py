"""A version in the making: memory for what an outer step makes, and its payloads while it does. Pure: numpy only."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from diloco.pipeline.bus.commits import Staged
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.chunks import Grown, Payload, nobody
from diloco.pipeline.payload.codec import as_bytes
from diloco.pipeline.transfer.global_format import Kind, Published, Step, StepWriter
from diloco.pipeline.transfer.global_formats import FORMATS
from diloco.pipeline.transfer.outer_state import STATE_RULES, OuterState, vectors
from diloco.syncer.merging.merge import Sum

Float32 = npt.NDArray[np.float32]


class Draft:
    """The values and the outer state after an outer step, and the digests of what is there already.

    `sum` adds up the contributions where the values will be. Then, in this order: `prepare`, `uploads`, `begin`, and
    the step is written from front to back.
    """

    def __init__(self, layout: FragmentLayout, sync: SyncSpec, grown: Grown = nobody) -> None:
        """grown: called when more chunks of any payload are whole, by the thread that takes the step."""
        self._layout, self._sync, self._grown = layout, sync, grown
        self._writer = FORMATS[sync.global_codec].writer(layout.id, layout.elements, sync, grown)
        self.theta = self._writer.values
        """(elements,) in the end the new values."""
        self.outer_state: OuterState = {}
        """After the step; empty: all zeros."""
        self._state_payload: Payload | None = None
        self.sum = Sum(layout, self.theta)

    @property
    def digest(self) -> bytes:
        """Of the exact values, once all are written."""
        return self._writer.exact.digest

    def discard_sum(self) -> None:
        """Begin the sum anew."""
        self.sum = Sum(self._layout, self.theta)

    def prepare(self, mu: float, orthogonal: bool = False) -> None:
        """Before the uploads begin: what the step will be. Again for the same step it changes nothing.

        Args:
            mu: outer momentum; 0: the step keeps no state.
            orthogonal: some of it is orthogonalised, so it does not tell its pseudogradient.
        """
        self._writer.prepare(averaged=not mu, told=not orthogonal)
        if mu and self._state_payload is None:
            names = STATE_RULES[self._sync.outer].names
            joined = pooled(len(names) * self._layout.elements, np.float32)
            self.outer_state = vectors(joined, names)
            self._state_payload = Payload(as_bytes(joined), self._sync.chunk_bytes, self._grown)

    def begin(self, theta: Float32, before: OuterState, lr: float, mu: float) -> "DraftWriter":
        """Take the step from these values (elements,) and this outer state."""
        rule = STATE_RULES[self._sync.outer](lr, mu) if self.outer_state else None
        step = self._writer.begin(Step(theta, before, self.outer_state, rule))
        return DraftWriter(step, None if self._writer.takes_steps else theta, self._state_payload, len(theta))

    def uploads(self, version: int) -> dict[Kind, Payload]:
        """What of a version goes to the bus."""
        found = self._writer.uploads(version)
        if self._state_payload is not None and self._writer.is_alone(version):
            found["momentum"] = self._state_payload
        return found

    def published(self, head: Head, staged: Mapping[Kind, Staged]) -> Published:
        """What the next head names. head: of the version before; staged: all uploads."""
        return self._writer.published(head, staged)


class DraftWriter:
    """A draft while the outer step is taken."""

    def __init__(self, step: StepWriter, base: Float32 | None, state: Payload | None, elements: int) -> None:
        self._step, self._state, self._elements = step, state, elements
        self.base = base
        """(elements,) what the step is subtracted from; None: the step itself is to be written."""

    def reduced(self) -> None:
        """All of the pseudogradient is in the draft's values, and no element of it has been stepped yet."""
        self._step.reduced()

    def written(self, stop: int) -> None:
        """All elements before `stop`, and of the outer state, are as the outer step makes them."""
        done = self._step.written(stop)
        if self._state is not None:
            # The vectors lie one after another: the later ones are sent once the first is whole.
            self._state.grow_to(4 * done if done < self._elements else self._state.nbytes)
