"""One fragment's history as the oracle accounts for it; it goes back together with the bus."""

from copy import copy
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.fragment import DeltaHeader

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
    due: set[tuple[int, bytes]] = field(default_factory=set)
    """Bases, as (version, digest), on which a due delta was offered. A digest alone is no base: where nobody remembers
    the head, version 0 has the values, and so the digest, of the version that a learner had adopted."""
    window_closed: bool = False
    """Its head says that the window gathers no more. An owner that reads all over again and finds it so need not say it
    again."""
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

    @property
    def may_open(self) -> bool:
        """Whether a due delta on the present version was offered."""
        return (self.version, self.digests.get(self.version)) in self.due

    def forget_due(self, base: tuple[int, bytes]) -> None:
        """A delta on the base was refused: a merge after a rewind may make the same version anew, and then a window
        opens only for a due delta on it that is still pending."""
        if not any(one.due and base_of(one) == base for one in self.pending.values()):
            self.due.discard(base)

    def is_outdone(self, header: DeltaHeader) -> bool:
        """Whether a later attempt at the same training is pending."""
        return any(
            training_of(other) == training_of(header) and other.attempt > header.attempt
            for other in self.pending.values()
        )


def base_of(header: DeltaHeader) -> tuple[int, bytes]:
    """What a delta is measured from: (version, digest)."""
    return header.base_version, header.base_digest


def training_of(header: DeltaHeader) -> tuple[str, str, int, bytes]:
    """Whose training on which base it has; attempts at it share this."""
    return header.learner, header.incarnation, *base_of(header)
