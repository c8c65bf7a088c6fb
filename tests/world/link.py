"""The way between one party and the bus: calls take time, get lost, come twice, and the party may die in one.

A link is a `Bus` to the production code on its side. The call reaches the memory bus after a while, takes
effect there in one step, is shown to the world (`observe`), and is answered. A party that is dead never
reaches the bus again, whatever its clean-up code tries.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.spec import Spec
from tests.world.record import WorldBus

BLOCKING = ("read_tape", "read_offers", "read_chunks")
SLOW_S = 0.05


@dataclass(slots=True)
class Fate:
    """What happens to one call; one is made for each."""

    delay_s: float
    lost: bool = False
    reply_lost: bool = False
    twice: bool = False
    late_s: float = 0.0
    """Above 0: its caller gives up, and it takes effect so much later all the same."""


class Link:
    """One party's connection, from its start to its death."""

    def __init__(self, bus: WorldBus, world: Any, party: str, first_call: int, hangs_s: float) -> None:
        """`world`: as `World`, by what it says to links. `hangs_s`: how long a call waits for an answer that does not
        come."""
        self.bus, self._world, self._hangs_s = bus, world, hangs_s
        self._breaks = 0
        self._time = asyncio.get_running_loop().time
        self.party = party
        self.calls = first_call
        self.dead = self.late = False
        """`late`: what is observed now took effect after its caller gave up."""
        self.sent_s = 0.0
        """When what is observed now was sent."""
        self.beside = False
        """It reaches the server that was there before a failover."""
        self.paused_until = 0.0
        self.cut_until = self.slow_until = 0.0
        """Until when no call reaches the bus, and each takes long."""
        self._slow: deque[tuple[float, float]] = deque(maxlen=100)
        self._in_flight: dict[int, None] = {}

    @property
    def keys(self) -> Any:
        """Names of the run's keys."""
        return self.bus.keys

    def use_spec(self, spec: Spec) -> None:
        """As the bus."""
        self.bus.use_spec(spec)

    async def close(self) -> None:
        """Nothing is kept open."""

    def break_calls(self) -> None:
        """The connection is lost: reads that wait end with an error, as does what is under way."""
        self._breaks += 1
        self.bus.disconnect()

    def held_up_s(self, since_s: float) -> float:
        """Seconds since then in which a call was slow on its way, or `slow` work was done."""
        now, held_s, counted = self._time(), 0.0, since_s
        for began, end in sorted(self._slow):
            held_s += max(0.0, min(end, now) - max(began, counted))
            counted = max(counted, end)
        return held_s

    def pause(self, lasts_s: float) -> None:
        """As SIGSTOP for a while."""
        self.paused_until = self._time() + lasts_s
        self.slow(lasts_s)

    def slow(self, took_s: float) -> None:
        """Something takes long from now on."""
        now = self._time()
        self._slow.append((now, now + took_s))

    # --- one call ------------------------------------------------------------------------------------

    async def _call(self, name: str, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
        number, sent_s = self.calls, self._time()
        self.calls += 1
        world, method = self._world, getattr(self.bus, name)
        fate = world.fate(self.party, number, name)
        if name not in BLOCKING:
            self._in_flight[number] = None
        try:
            await self._travel(fate.delay_s)
            world.crash_point(self, name, after=False)
            if self.paused_until:
                await self._wake_up()
            if self.dead:
                raise BusUnavailable("dead")
            if fate.late_s:
                self._world.later(fate.late_s, partial(self._late, name, method, args, more, sent_s))
            if fate.lost or fate.late_s or not self._reaches():
                await self._travel(self._hangs_s)
                raise BusUnavailable("no answer: the call was lost")
            breaks = self._breaks
            outcome = await self._effect(name, method, args, more, sent_s)
            if fate.twice and not self.dead and self._reaches():
                outcome = await self._effect(name, method, args, more, sent_s)
            world.crash_point(self, name, after=True)
            if self.paused_until:
                await self._wake_up()
            if fate.reply_lost:
                await self._travel(self._hangs_s)
                raise BusUnavailable("no answer: the reply was lost")
            if self.dead or breaks != self._breaks or not self._reaches():
                raise BusUnavailable("the connection was lost")
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        finally:
            self._in_flight.pop(number, None)
            if name not in BLOCKING and any(other < number for other in self._in_flight):
                world.overtaken(self.party)

    async def _travel(self, delay_s: float) -> None:
        """Time passes on the way; a paused party's messages wait with it."""
        if self.dead:
            raise BusUnavailable("dead")
        if delay_s > SLOW_S:
            self.slow(delay_s)
        await asyncio.sleep(delay_s)
        await self._wake_up()

    async def _wake_up(self) -> None:
        """The end of a pause, if there is one."""
        while (left_s := self.paused_until - self._time()) > 0:  # a pause may be prolonged
            await asyncio.sleep(left_s)
        if self.dead:
            raise BusUnavailable("dead")

    async def _late(self, name: str, method: Any, args: tuple[Any, ...], more: dict[str, Any], sent_s: float) -> None:
        if self._world.bus_up(self) and name not in BLOCKING:  # a read that nobody waits for does nothing
            await self._effect(name, method, args, more, sent_s, late=True)

    def _reaches(self) -> bool:
        return self._world.bus_up(self) and self._time() >= self.cut_until

    async def _effect(
        self, name: str, method: Any, args: tuple[Any, ...], more: dict[str, Any], sent_s: float, late: bool = False
    ) -> Any:
        """The call on the memory bus; its result, or the bus's own error as a value."""
        outcome: Any
        try:
            outcome = await method(*args, **more)
        except Exception as error:  # shown to the world, then raised to the party
            outcome = error
        self.late, self.sent_s = late, sent_s
        self._world.observe(self, name, args, more, outcome)
        return outcome


def _calling(name: str) -> Callable[..., Awaitable[Any]]:
    def call(self: Link, *args: Any, **more: Any) -> Awaitable[Any]:
        return self._call(name, args, more)

    return call


for _name, _ in inspect.getmembers(Bus, inspect.iscoroutinefunction):
    if _name != "close":
        setattr(Link, _name, _calling(_name))
