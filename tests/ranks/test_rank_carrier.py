"""What rank 0 has its servers do at a time: as a learner pulls, and as it leaves."""

import asyncio
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import structlog

from diloco.pipeline.retry import Outages
from diloco.workers.ranks.placement import SMALL, servers_of
from diloco.workers.ranks.rank_carrier import InFlight, RanksCarrier
from diloco.workers.rounds import Base, Publication
from diloco.workers.times import TIMES
from tests import samples


class Servers:
    """The ranks, as rank 0's connections to them: what they are asked takes until the test says so."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.begun: list[tuple[str, int, int]] = []
        """What was asked, of which fragment and rank, in this order."""
        self._done: dict[tuple[str, int], asyncio.Event] = {}

    def start_task(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """As `Transport`."""
        return asyncio.create_task(work)

    def notify(self, rank: int, what: str, *said: Any) -> None:
        """As `Transport`."""
        self.begun.append((what, said[0], rank))

    async def ask_all(self, what: str, p: int, *said: Any) -> None:
        """As `Transport`."""
        for rank in range(self.ranks):
            await self.ask(rank, what, p, *said)

    async def ask(self, rank: int, what: str, p: int, *said: Any) -> bool:
        """As `Transport`."""
        self.begun.append((what, p, rank))
        if what == "upload":
            await self.done(what, p).wait()
        return True

    def done(self, what: str, p: int) -> asyncio.Event:
        """Set: it is."""
        return self._done.setdefault((what, p), asyncio.Event())

    def asked(self, what: str, rank: int = 0) -> list[int]:
        """Fragments of which a rank was asked that so far."""
        return [p for kind, p, of in self.begun if (kind, of) == (what, rank)]


def crew(sizes: Sequence[int], ranks: int) -> tuple[Servers, RanksCarrier, InFlight]:
    dealt = servers_of(sizes, ranks)
    servers, in_flight = Servers(ranks), InFlight(sizes, dealt)
    fragments = [SimpleNamespace(elements=size) for size in sizes]
    member: Any = SimpleNamespace(
        learner="l",
        incarnation="0123abcd",
        outages=Outages(structlog.get_logger(), TIMES.retry),
        layout=SimpleNamespace(fragments=fragments),
    )
    carrier = RanksCarrier(servers, member, in_flight, dealt)  # type: ignore[arg-type]
    carrier.joining = False
    return servers, carrier, in_flight


async def settle() -> None:
    """Have all that can go on do so."""
    for _ in range(30):
        await asyncio.sleep(0)


def pull(carrier: RanksCarrier, *fragments: int) -> dict[int, "asyncio.Task[Any]"]:
    """Have these pulled, as each lane does; the numbers of their globals."""
    heads = {p: samples.head(p, version=1) for p in fragments}
    return {p: asyncio.create_task(carrier.pull(lambda p=p: heads[p])) for p in fragments}  # type: ignore[misc]


async def test_a_server_has_one_global_that_is_pulled_and_not_adopted() -> None:
    """However many heads are new: a rank has room for one beside the bases of its fragments."""
    servers, carrier, _ = crew([SMALL] * 6, 2)
    numbers = pull(carrier, *range(6))
    first = {rank: [p for p in range(6) if carrier._servers[p] == rank] for rank in range(2)}
    for turn in range(3):
        await settle()
        for rank in range(2):
            assert servers.asked("pull", rank) == first[rank][: turn + 1]
        for rank in range(2):
            p = first[rank][turn]
            carrier.adopted(p, numbers[p].result())


async def test_small_globals_are_pulled_together_and_a_large_one_in_its_turn() -> None:
    """As many as have room; who comes later waits behind one that needs the server for itself."""
    servers, carrier, _ = crew([SMALL // 4] * 3 + [SMALL], 1)
    numbers = pull(carrier, 0, 1)
    await settle()
    assert servers.asked("pull") == [0, 1]
    numbers |= pull(carrier, 3)
    await settle()
    numbers |= pull(carrier, 2)
    await settle()
    assert servers.asked("pull") == [0, 1]
    for p in 0, 1:
        carrier.adopted(p, numbers[p].result())
        await settle()
    assert servers.asked("pull") == [0, 1, 3]
    carrier.adopted(3, numbers[3].result())
    await settle()
    assert servers.asked("pull") == [0, 1, 3, 2]


async def test_as_a_learner_leaves_a_server_has_one_snapshot_at_a_time() -> None:
    """As while it trains: ranks need no more memory for it, and all fragments are published."""
    servers, carrier, in_flight = crew([SMALL] * 6, 2)
    in_flight.leave()
    uploads = [
        asyncio.create_task(carrier.upload(Publication(Base(p, 1, b"", 0), 0, p, 1, 1, True), None, lambda: True))
        for p in range(6)
    ]
    for turn in range(3):
        await settle()
        now = [2 * turn, 2 * turn + 1]
        for rank in range(2):
            assert servers.asked("snapshot", rank) == list(range(2 * turn + 2))
            assert servers.asked("upload", rank)[turn:] == [now[rank]]
        for p in now:
            servers.done("upload", p).set()
    await asyncio.gather(*uploads)


async def test_a_last_snapshot_that_is_of_no_use_when_its_turn_comes_is_not_taken() -> None:
    """While it waited, others have merged its fragment twice."""
    servers, carrier, in_flight = crew([SMALL] * 2, 1)
    in_flight.leave()
    of_use = [True, True]
    uploads = [
        asyncio.create_task(
            carrier.upload(Publication(Base(p, 1, b"", 0), 0, p, 1, 1, True), None, lambda p=p: of_use[p])  # type: ignore[misc]
        )
        for p in range(2)
    ]
    await settle()
    of_use[1] = False
    servers.done("upload", 0).set()
    assert await asyncio.gather(*uploads) == [True, False]
    assert servers.asked("snapshot") == [0]
