"""Headers of one fragment, read ahead of the window. asyncio."""

import asyncio
from collections.abc import Iterator

from pipeline.ports import Bus, Offered
from pipeline.stored import parse_offer_id
from pipeline.waiting import woken_or_done

BLOCK_S = 1.0
MOST_ARRIVED = 1024
"""Headers that were read and not looked at; with more, reading waits."""
MOST_AT_ONCE = 256
"""Headers looked at before the window decides again, however many more there are."""


class Arrivals:
    """Reads from the start of the streams until it is closed: they hold all that is pending."""

    def __init__(self, bus: Bus, fragment: int, wake: asyncio.Event) -> None:
        self._bus, self._p, self._wake = bus, fragment, wake
        self._arrived: asyncio.Queue[Offered] = asyncio.Queue(MOST_ARRIVED)
        self._reader = asyncio.create_task(self._read())

    @property
    def empty(self) -> bool:
        """Whether all that came was looked at."""
        return self._arrived.empty()

    def some(self) -> Iterator[Offered]:
        """The oldest of those that are here, not too many at once."""
        for _ in range(min(self._arrived.qsize(), MOST_AT_ONCE)):
            yield self._arrived.get_nowait()

    def check(self) -> None:
        """Go on only while reading does.

        Raises:
            BusError: what ended it: what came before an outage may be lost with it.
        """
        if self._reader.done():
            self._reader.result()

    async def wait(self, timeout_s: float) -> None:
        """Until something happened (`wake`), reading has ended, or the time is over."""
        await woken_or_done(self._wake, self._reader, timeout_s)

    async def close(self) -> None:
        """Read no more."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        after: dict[str, str] = {}
        while True:
            for entry in await self._bus.read_offers(self._p, after, BLOCK_S):
                learner, after_id = parse_offer_id(entry.entry_id)
                after = {**after, learner: after_id}
                self._wake.set()
                await self._arrived.put(entry)
                self._wake.set()
