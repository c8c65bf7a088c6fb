"""What all parts of a joined learner's exchange work with; it outlasts an unavailable bus. asyncio.

Whatever is asked of the bus is asked again, for as long as that takes.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Never

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.errors import BusError, BusUnavailable, PeerError, SpecMismatch, outage_event
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.retry import Backoff, Errors, retry
from diloco.workers.encoding import Encoder
from diloco.workers.exchange.shared import Shared

BACKOFF = Backoff(0.1, 2.0)


class Outages:
    """The failed calls of one learner."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self.count = 0
        """Calls that found no bus, since joining."""
        self.gap = False
        """Work was broken off by one: what was told meanwhile is not known. Reset by whoever reads all anew."""

    async def retry(self, call: Callable[..., Awaitable[Any]], *args: Any, unless: Errors = ()) -> Any:
        """Call until the bus answers.

        Raises:
            unless: these are not for trying again.
        """
        return await retry(lambda: call(*args), BACKOFF.waits(), BusError, self._failed, unless)

    async def forever(self, work: Callable[[], Awaitable[None]]) -> Never:
        """Do a work of which there is always more; begin it again whenever the bus or a peer breaks it off.

        Raises:
            SpecMismatch: the run is another one by now.
        """

        def failed(error: BaseException, wait_s: float) -> None:
            self.gap |= isinstance(error, BusUnavailable)
            self._failed(error, wait_s, task=work.__name__)

        waits = BACKOFF.waits()
        while True:
            await retry(work, waits, (BusError, PeerError), failed, SpecMismatch)

    def _failed(self, error: BaseException, wait_s: float, **where: str) -> None:
        self.count += isinstance(error, BusUnavailable)
        self._log.warning(outage_event(error), error=str(error), retry_s=wait_s, **where)


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
