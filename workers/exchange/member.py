"""What all parts of a joined learner's exchange work with."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.spec import Spec
from diloco.workers.encoding import Encoder
from diloco.workers.exchange.outages import Outages
from diloco.workers.exchange.shared import Shared

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
