"""One fragment's history as the oracle accounts for it; it goes back together with the bus."""

from copy import copy
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.delta import DeltaHeader

Float64 = npt.NDArray[np.float64]


@dataclass(slots=True)
class Surviving:
    """One fragment's history as it stands on the bus. theta, momentum: (elements,), zeros before the first version."""

    theta: Float64
    momentum: Float64
    version: int = -1
    interval: int = 0
    """As its head says it."""
    digests: dict[int, bytes] = field(default_factory=dict)
    pending: dict[str, DeltaHeader] = field(default_factory=dict)
    merged: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """(learner, incarnation, base version) -> tokens."""
    due: set[bytes] = field(default_factory=set)
    """Digests of bases on which a due delta was offered."""
    before: Float64 = field(default_factory=lambda: np.zeros(0))
    """(elements,) theta of the version before; of none before the second one."""

    @classmethod
    def none(cls, elements: int) -> "Surviving":
        """Before the first version."""
        return cls(np.zeros(elements), np.zeros(elements))

    def copy(self) -> "Surviving":
        """As it is now; arrays are never changed in place."""
        twin = copy(self)
        twin.digests, twin.pending = dict(self.digests), dict(self.pending)
        twin.merged, twin.due = dict(self.merged), set(self.due)
        return twin

    def is_outdone(self, header: DeltaHeader) -> bool:
        """Whether a later attempt at the same training is pending."""
        same = (header.learner, header.incarnation, header.base_digest)
        return any(
            (other.learner, other.incarnation, other.base_digest) == same and other.attempt > header.attempt
            for other in self.pending.values()
        )
