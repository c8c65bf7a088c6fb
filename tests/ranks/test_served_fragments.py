"""Fragments at their server: what was trained and merged is merged, or still owed."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import MergedBase
from diloco.pipeline.payload.codec import PayloadReader
from diloco.pipeline.retry import Backoff, Outages
from diloco.pipeline.settings import SyncSettings
from diloco.workers.encoding import OnHost
from diloco.workers.exchange import carrier as own_carrier
from diloco.workers.exchange.pulling import Pulling
from diloco.workers.exchange.shared import Shared
from diloco.workers.ranks.gather import Transfers
from diloco.workers.ranks.placement import SLICE, Block, Shares
from diloco.workers.ranks.rank_carrier import InFlight, RanksCarrier
from diloco.workers.ranks.transport import Transport
from diloco.workers.rounds import Base, Publication
from diloco.workers.times import TIMES
from tests import samples
from tests.ranks.test_transport import connected_ranks

ELEMENTS = SLICE + 1000
"""So that a vector takes two messages."""
LAYOUT = layout_of((samples.tensor("t", (ELEMENTS,), rule="mean"),))
SYNC = SyncSettings(fragments=1, codec="int8").sync_spec()
ME = {"learner": "l", "incarnation": "0123abcd"}


class Crew:
    """Ranks of a learner of one fragment, all of whose globals are zero; the fragment's server is as the test says."""

    def __init__(self, transport: Sequence[Transport], monkeypatch: pytest.MonkeyPatch, server: int = 0) -> None:
        self.in_flight, self.rng = InFlight([ELEMENTS], [server]), np.random.default_rng(0)
        self.pulling = asyncio.Event()
        self.pulling.set()
        """Cleared: it takes until it is set."""
        member: Any = SimpleNamespace(
            **ME,
            bus=SimpleNamespace(keys=RunKeys("r"), write_chunks=self._write_chunks),
            spec=SimpleNamespace(sync=SYNC),
            layout=LAYOUT,
            encoder=OnHost(),
            offload=self._offload,
            outages=Outages(structlog.get_logger(), TIMES.retry),
            log=structlog.get_logger(),
        )
        self.member = member
        shares = Shares(LAYOUT, [{"t": Block(0, ELEMENTS, 0, 1)}] * len(transport))
        shares.servers[0] = server
        self._shares = shares

        async def pull_shown(*_: object) -> np.ndarray:
            await self.pulling.wait()
            return np.zeros(ELEMENTS, np.float32)

        def none(p: int) -> Callable[[], np.ndarray]:
            raise AssertionError

        monkeypatch.setattr(own_carrier, "pull_shown", pull_shown)
        self.parts = [Transfers(one, member, shares, none, lambda p, own: None) for one in transport]
        self.carrier = RanksCarrier(transport[0], member, self.in_flight, shares.servers)
        self.carrier.joining = False
        self.version = self.serial = 0
        self.true, self.merged = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
        self.sent: Any = None

    async def _offload(self, work: Any, *args: Any) -> Any:
        return work(*args)

    async def _write_chunks(self, key: str, first: int, batch: Sequence[Any], ttl_s: float) -> None:
        reader = PayloadReader(ELEMENTS, "int8", SYNC.chunk_bytes)
        for chunk in batch:
            reader.feed(chunk.joined())
        self.sent = reader.vector()[:]

    @property
    def residuals(self) -> list[Any]:
        """By rank."""
        return [part._carrier.feedback.residual(0) for part in self.parts]

    async def start_task(self) -> None:
        """A version adopted, and a delta on it published."""
        self.adopt(await self.pull())
        await self.until(self.decide)
        await self.publish()

    async def pull(self) -> int | None:
        return await self.carrier.pull(lambda: samples.head(version=self.version + 1))

    def adopt(self, number: int | None) -> None:
        assert number is not None
        self.version += 1
        for part in self.parts:
            part.pulled.pop((0, number))
            part.adopted(0, number)
        self.carrier.adopted(0, number)

    def decide(self) -> bool:
        """Whether a snapshot may be taken now."""
        return bool(self.in_flight.snapshot([0]))

    async def publish(self) -> None:
        """Snapshot it, and upload it."""
        delta = (self.rng.standard_normal(ELEMENTS) * 1e-3).astype(np.float32)
        self.delta, self.serial = delta, self.serial + 1
        for part in self.parts:
            own = (lambda: -delta) if self._shares.sent(part._rank, 0) else None
            part.send([(0, self.serial, own)])
        self.in_flight.counted([0])
        base = Base(0, self.version, b"", 0)
        publication = Publication(base, 0, self.serial, 1, self.serial, True)
        assert await self.carrier.upload(publication, self.serial, lambda: True)

    def merge(self) -> None:
        """What was sent last."""
        self.true += self.delta
        self.merged += self.sent
        self.carrier.merged(0, [MergedBase(**ME, base_version=self.version, tokens=self.serial)])

    async def until(self, true: Callable[[], Any]) -> None:
        while not true():
            await asyncio.sleep(0)

    async def check(self) -> None:
        """All that was merged is merged or owed, by one rank."""
        await self.until(lambda: not any(part._carrier.feedback._sent.get(0) for part in self.parts))
        assert sum(one is not None for one in self.residuals) == 1
        owed = next(one for one in self.residuals if one is not None)
        np.testing.assert_allclose(self.merged + owed, self.true, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("ranks", "server"), [(2, 0), (2, 1), (3, 2)])
async def test_what_is_merged_and_what_is_owed_are_what_was_trained_whoever_serves(
    ranks: int, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several versions, and deltas of which some were refused."""
    async with connected_ranks(ranks) as transport:
        crew = Crew(transport, monkeypatch, server)
        for version in range(9):
            crew.adopt(await crew.pull())
            await crew.until(crew.decide)
            await crew.publish()
            if version % 4 == 2:
                crew.carrier.passed(0, crew.version + 2)  # nobody merged it
            else:
                crew.merge()
        await crew.check()


async def test_a_rank_that_has_left_holds_nothing_of_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    """No base, nothing of what its deltas have lost, and nothing that it was about to adopt."""
    async with connected_ranks(2) as transport:
        crew = Crew(transport, monkeypatch)
        await crew.start_task()
        crew.merge()
        await crew.until(lambda: crew.residuals[0] is not None)
        (part, other), number = crew.parts, await crew.pull()
        vectors = *(base.values for base in part._bases.values()), part._carrier._bases[0].values, crew.residuals[0]
        held = [weakref.ref(one) for one in (*vectors, other.pulled[0, number])]
        del vectors
        for one in crew.parts:
            one.forget()
    gc.collect()
    assert len(held) == 5
    assert all(one() is None for one in held)


async def test_a_pull_that_is_cancelled_ends_before_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what it has pulled nothing is left once the next global is adopted."""
    async with connected_ranks(2) as transport:
        crew = Crew(transport, monkeypatch)
        await crew.start_task()
        crew.merge()
        crew.pulling.clear()
        pulling = asyncio.create_task(crew.pull())
        await crew.until(lambda: crew.carrier._room.taken)
        pulling.cancel()
        with suppress(asyncio.CancelledError):
            await pulling
        again = asyncio.create_task(crew.pull())
        for _ in range(30):
            await asyncio.sleep(0)
        assert not again.done()
        crew.pulling.set()
        crew.adopt(await again)
        await crew.check()
        assert [len(part._bases) for part in crew.parts] == [1, 0]
        assert not any(part.pulled for part in crew.parts)


async def test_a_snapshot_has_the_base_of_its_own_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the next global is adopted in the same turn of the loop."""
    async with connected_ranks(2) as transport:
        crew = Crew(transport, monkeypatch)
        crew.adopt(await crew.pull())
        number = await crew.pull()
        crew.parts[0].send([(0, 9, lambda: np.zeros(ELEMENTS, np.float32))])
        crew.adopt(number)
        await crew.until(lambda: crew.parts[0]._gathering[0, 9].whole.is_set())
        base = crew.parts[0]._gathering[0, 9].base
        assert base is not None
        assert base.version == 1


async def test_a_rank_whose_rows_are_not_finite_says_so_once_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, so that one machine can be looked at; the others say nothing, and a huge sum is no NaN."""
    async with connected_ranks(2) as transport:
        crew = Crew(transport, monkeypatch, server=1)
        crew.adopt(await crew.pull())
        with structlog.testing.capture_logs() as logs:
            for tag, value in enumerate([0.0, 3e38, np.nan, np.inf, 0.0, np.nan]):
                values = np.full(ELEMENTS, value, np.float32)
                crew.parts[1].send([(0, tag, values.copy)])
                await crew.until(lambda: crew.parts[1]._gathering[0, tag].whole.is_set())  # noqa: B023  # called here
        told = [(one["event"], one["rank"], one["fragment"]) for one in logs]
        assert told == [("rank_not_finite", 1, 0)] * 2


async def test_the_newest_head_is_pulled_and_neither_its_turn_nor_an_outage_counts(monkeypatch: Any) -> None:
    """Of those that come while the server is busy, and while its bus is away: of that time nothing is the pull's."""
    now, fails, heads = [100.0], [2], [samples.head(version=2)]

    def pull_shown(*given: Any) -> Any:
        now[0] += 1
        if fails[0]:
            fails[0] -= 1
            now[0] += 1000
            raise BusUnavailable("away")
        heads.append(given[1])
        return np.zeros(ELEMENTS, np.float32)

    async with connected_ranks(2) as transport:
        crew = Crew(transport, monkeypatch)
        crew.member.outages = Outages(structlog.get_logger(), Backoff(0.001, 0.001))
        await crew.start_task()
        crew.merge()
        first = await crew.pull()  # not adopted yet: the next one waits

        async def shown(*given: Any) -> Any:
            return pull_shown(*given)

        monkeypatch.setattr(own_carrier, "pull_shown", shown)
        member: Any = SimpleNamespace(
            layout=LAYOUT, clock=SimpleNamespace(now=lambda: now[0]), shared=Shared(), log=structlog.get_logger()
        )
        pulling = Pulling(member, crew.carrier)
        pulling._wanted[0], pulling._seen_s[0] = samples.head(version=3), 100.0
        working = asyncio.create_task(pulling._pull_wanted_on(0))
        await asyncio.sleep(0.01)
        now[0] = 900.0
        pulling._wanted[0], pulling._seen_s[0] = samples.head(version=4), 890.0
        crew.adopt(first)
        await crew.until(lambda: pulling.latest)
        working.cancel()
        assert heads[-1].version == 4
        assert pulling.latest[0][0] == 4
        assert member.shared.pull_s == 1.0
