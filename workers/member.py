"""What all parts of a joined learner's exchange work with."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pipeline.fragments import Layout
from pipeline.ports import Bus, Clock
from pipeline.spec_messages import Spec

from .encoding import Encoder
from .outages import Outages
from .shared import Shared

Offload = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Member:
    """One incarnation of a learner that has agreed with its run on the spec. The exchange thread's."""

    bus: Bus
    clock: Clock
    learner: str
    incarnation: str
    spec: Spec
    """The run's."""
    layout: Layout
    shared: Shared
    encoder: Encoder
    offload: Offload
    """Runs heavy work."""
    outages: Outages
    log: Any

    async def apart(self, elements: int, work: Callable[..., Any], *args: Any) -> Any:
        """Work on so many elements: in another thread, unless to wake that takes longer than the work itself."""
        return work(*args) if elements <= self.encoder.at_once else await self.offload(work, *args)
