"""What all fragments of one syncer are served with: the agreed spec, and the syncer itself."""

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.pipeline.agreement import differences
from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.errors import BadMessage
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.outer_cost import Speed
from diloco.pipeline.payload.codec import decode, encode
from diloco.pipeline.transfer.payloads import Offload
from diloco.syncer.admission import Diverged
from diloco.syncer.downloads import Coming
from diloco.syncer.membership import RunWatch
from diloco.syncer.metrics import Metrics
from diloco.syncer.replay.recording import Recorder

RandomHex = Callable[[int], str]
"""`random_hex(n)`: 2n hex digits for a nonce; injected, so that a simulated run can be repeated."""


class AgreedSpec:
    """The spec that a run's parties agree on; tells whether the bus still has it."""

    def __init__(self, bus: Bus, spec: Spec) -> None:
        self._bus, self.spec, self.encoded = bus, spec, encode(spec)

    async def another(self) -> str:
        """How the bus's spec differs from this run's; "" if it does not, or there is none.

        Raises:
            BusError: ask again.
        """
        return self.differs(await self._bus.read_spec())

    def differs(self, found: bytes | None) -> str:
        """The same of what the bus was found to have."""
        if found is None or found == self.encoded:
            return ""
        try:
            return differences(self.spec, decode(Spec, found))
        except BadMessage as error:
            return f"  it cannot be read: {error}"


@dataclass(frozen=True, slots=True)
class SyncerContext:
    """One syncer in one run: made once the spec is agreed, and never changed."""

    bus: Bus
    clock: Clock
    agreed: AgreedSpec
    layout: Layout
    watch: RunWatch
    metrics: Metrics
    nonce: str
    """Of its leases."""
    name: str
    """For the tape."""
    offload: Offload
    """Runs heavy work where it holds nothing up."""
    random_hex: RandomHex
    recorder: Recorder | None
    speed: Speed
    """Of its products of matrices."""
    coming: Coming = field(default_factory=Coming)
    """Of learners' uploads, in all fragments."""
    diverged: Diverged = field(default_factory=Diverged)

    @property
    def sync(self) -> SyncSpec:
        """How the run synchronises."""
        return self.agreed.spec.sync
