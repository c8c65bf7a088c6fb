"""The things that all parts of a joined learner's exchange work with."""

from dataclasses import dataclass
from typing import Any

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.retry import Outages
from diloco.pipeline.transfer.payloads import Offload
from diloco.workers.encoding import Encoder
from diloco.workers.exchange.shared import Shared


@dataclass(frozen=True, slots=True)
class Member:
    """One incarnation of a learner that has agreed with its run on the spec. Used by the exchange thread only."""

    bus: Bus
    clock: Clock
    learner: str
    incarnation: str
    spec: Spec
    """The run's spec."""
    layout: Layout
    shared: Shared
    encoder: Encoder
    offload: Offload
    """Runs heavy work in another thread."""
    outages: Outages
    log: Any
