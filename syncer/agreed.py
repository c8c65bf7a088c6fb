"""The spec that a run's parties agree on, as this syncer knows it. asyncio."""

from pipeline.agreement import differences
from pipeline.codec import decode, encode
from pipeline.errors import BadMessage
from pipeline.messages import Spec
from pipeline.ports import Bus


class AgreedSpec:
    """Tells whether the bus still has it."""

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
