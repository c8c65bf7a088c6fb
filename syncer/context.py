"""Context that all fragments of one syncer share: the agreed spec, and the syncer's own services."""

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
from diloco.syncer.admission import Diverged, UploadProgress
from diloco.syncer.membership import RunWatch
from diloco.syncer.metrics import Metrics
from diloco.syncer.replay.recording import Recorder

# `random_hex(n)` returns 2n hex digits for a nonce. It is injected, so that a simulated run can be repeated.
RandomHex = Callable[[int], str]


class AgreedSpec:
    """The spec that all parties of a run agree on, with a check whether the bus still has it."""

    def __init__(self, bus: Bus, spec: Spec) -> None:
        self._bus, self.spec, self.encoded = bus, spec, encode(spec)

    async def another(self) -> str:
        """Return how the bus's spec differs from this run's; "" if it does not, or if the bus has none.

        Raises:
            BusError: the bus failed; call it again.
        """
        return self.differs(await self._bus.read_spec())

    def differs(self, found: bytes | None) -> str:
        """Return how a spec that was read from the bus differs from this run's; "" if it does not, or for None."""
        if found is None or found == self.encoded:
            return ""
        try:
            return differences(self.spec, decode(Spec, found))
        except BadMessage as error:
            return f"  it cannot be read: {error}"


@dataclass(frozen=True, slots=True)
class SyncerContext:
    """One syncer in one run. It is made once the spec is agreed; its fields are never reassigned."""

    bus: Bus
    clock: Clock
    agreed: AgreedSpec
    layout: Layout
    watch: RunWatch
    metrics: Metrics
    nonce: str
    """Identifies this syncer as the holder of its leases."""
    name: str
    """Name of this syncer on the tape."""
    offload: Offload
    """Runs heavy work off the event loop."""
    random_hex: RandomHex
    recorder: Recorder | None
    speed: Speed
    """How fast this machine multiplies matrices."""
    upload_progress: UploadProgress = field(default_factory=UploadProgress)
    """Progress of the learners' uploads, in all fragments."""
    diverged: Diverged = field(default_factory=Diverged)

    @property
    def sync(self) -> SyncSpec:
        """How the run synchronises."""
        return self.agreed.spec.sync
