"""What all fragments of one syncer are served with."""

from dataclasses import dataclass

from pipeline.fragments import Layout
from pipeline.messages import SyncSpec
from pipeline.ports import Bus, Clock

from .agreed import AgreedSpec
from .fragment import MakeFragment
from .intake import Offload
from .metrics import Metrics
from .recording import Recorder
from .staging import RandomHex
from .watch import RunWatch


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
    make_fragment: MakeFragment
    recorder: Recorder | None

    @property
    def sync(self) -> SyncSpec:
        """How the run synchronises."""
        return self.agreed.spec.sync
