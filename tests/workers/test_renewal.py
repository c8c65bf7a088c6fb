"""A delta that nobody merges is renewed: what an outage of all syncers costs is no more than the work since."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.errors import BadMessage, BusError, BusUnavailable
from diloco.pipeline.fragments import layout_of
from diloco.workers.rounds import Base, Publication, Rounds
from diloco.workers.times import TIMES
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.shares import Deployment, totals_of
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, end, spec_of, sync_spec


def rounds_of(interval: int, fragments: int = 1, **changes: Any) -> Rounds:
    """Of one who has adopted version 1 of each fragment."""
    sync = sync_spec(fragments=fragments, sync_interval=interval, **changes)
    rounds = Rounds(layout_of(spec_of(sync).tensors), sync)
    for version, p in itertools.product((0, 1), range(fragments)):
        rounds.adopt(Base(p, version, bytes(16), np.zeros(7, np.float32)))
    return rounds


def published(rounds: Rounds, steps: int, uploaded: dict[int, int], uploads: bool = True) -> list[tuple[int, bool]]:
    """(Step, whether it renews one) of what is published in so many steps; each is uploaded at once, if any is."""
    found = []
    for _ in range(steps):
        rounds.trained(10)
        for one in rounds.publications({}, uploaded):
            found.append((one.steps, bool(one.renews)))
            if uploads:
                uploaded[0] = one.serial
    return found


def test_a_delta_is_renewed_after_half_an_interval_and_less_often_the_longer_it_takes() -> None:
    """Each holds all of the training on its base; in a minute of outage there are a few, not one a step."""
    found = published(rounds_of(24), 240, {})
    assert found[:6] == [(24, False), (36, True), (48, True), (60, True), (72, True), (84, True)]
    steps = [step for step, _ in found]
    assert all(later - step <= max(12, step // 6 + 1) for step, later in itertools.pairwise(steps))
    assert len(found) < 15


def test_a_delta_that_is_still_on_its_way_is_not_renewed() -> None:
    """A slow network would never end an upload."""
    assert published(rounds_of(24), 240, {}, uploads=False) == [(24, False)]


def test_what_was_renewed_counts_once() -> None:
    """Published is the most of the attempts on one base; what came after the last one is overwritten."""
    rounds = rounds_of(4)
    assert published(rounds, 30, {}) == [(4, False), (16, True), (28, True)]
    assert rounds.published == 28 * 10 * 7
    rounds.adopt(Base(0, 2, bytes(16), np.zeros(7, np.float32)))
    assert rounds.overwritten == 2 * 10 * 7
    assert rounds.counts.tokens * 7 == rounds.published + rounds.overwritten


class Noting(VirtualLearner):
    """Its bus notes what it writes."""

    def connect(self) -> Bus:
        bus: Any = MemoryBus(RUN, self.world.clock, self.world.store)
        self.calls: list[tuple[str, str]] = []
        offer, write = bus.offer, bus.write_chunks

        async def noted_offer(header: Any, renews: str = "") -> str:
            keys = (header.fragment, header.learner, header.incarnation, header.serial)
            self.calls.append(("header", bus.keys.delta_payload(*keys)))
            entry: str = await offer(header, renews)
            return entry

        async def noted_write(key: str, *args: Any) -> None:
            await write(key, *args)
            self.calls.append(("payload", key))

        bus.offer, bus.write_chunks = noted_offer, noted_write
        connected: Bus = bus
        return connected

    def publish(self, publication: Publication) -> None:
        self.renewed = getattr(self, "renewed", 0) + bool(publication.renews)
        super().publish(publication)


async def without_syncer() -> tuple[VirtualRun, Noting]:
    """A run of one learner after its first merges: its syncer was killed."""
    world = VirtualRun(sync_spec(fragments=1, tokens=10**9))
    world.start_syncer()
    learner = Noting("l0", world)
    learner.start()
    await world.until_version(2)
    assert world.syncer is not None
    await world.kill_syncer()
    return world, learner


@in_virtual_time
async def test_a_delta_lies_on_the_bus_whole_until_the_one_that_renews_it_does() -> None:
    """The payload goes before the header, and what is renewed goes soon after: two of a fragment at most stay."""
    world, learner = await without_syncer()
    began = len(learner.calls)
    await asyncio.sleep(20)
    assert learner.renewed > 3
    calls = learner.calls[began:]
    written = [key for what, key in calls if what == "payload"]
    for key in written[1:]:
        assert calls.index(("payload", key)) < calls.index(("header", key))
    await asyncio.sleep(TIMES.renewed_ttl_s + 1)
    there = [key for key in dict.fromkeys(written) if await world.bus.count_chunks(key)]
    assert 1 <= len(there) <= 2, there
    assert len(await world.bus.read_offers(0)) == 1
    await end(learner)


@in_virtual_time
async def test_a_renewal_whose_header_meets_a_damaged_key_is_followed_by_another_one() -> None:
    """The one that it was to replace stays, and the next one contains its training too."""
    world, learner = await without_syncer()
    bus: Any = learner.bus
    offer, failed = bus.offer, list[int]()

    async def damaged(header: Any, renews: str = "") -> str:
        if renews and not failed:
            failed.append(header.serial)
            raise BadMessage("the key holds something else")
        entry: str = await offer(header, renews)
        return entry

    bus.offer = damaged
    await asyncio.sleep(20)
    newest = max(offered.header.serial for offered in await world.bus.read_offers(0) if offered.header)
    assert failed
    assert newest > failed[0] + 1
    await end(learner)


class Forgetful(VirtualLearner):
    """Its reads of the tape fail when told to; afterwards, one question for the tape's end may be refused."""

    fails = refused = False

    def connect(self) -> Bus:
        bus: Any = super().connect()
        read_tape, tape_end = bus.read_tape, bus.tape_end

        async def read(*args: Any) -> Any:
            if self.fails:
                raise BusUnavailable("away")
            return await read_tape(*args)

        async def end_of_tape() -> Any:
            if self.fails:
                raise BusUnavailable("away")
            if self.refused:
                self.refused = False
                raise BusError("refused")
            return await tape_end()

        bus.read_tape, bus.tape_end = read, end_of_tape
        connected: Bus = bus
        return connected


@pytest.mark.parametrize("refused", [False, True])
@in_virtual_time
async def test_after_an_outage_of_the_bus_deltas_are_offered_again_at_once(refused: bool) -> None:
    """It may have lost them. They are not left until they would be renewed, half an interval of 200 steps later."""
    world = VirtualRun(sync_spec(fragments=1, sync_interval=200, quorum=2, tokens=10**9))
    world.start_syncer()
    learner = Forgetful("l0", world)
    learner.start()

    async def newest() -> int:
        return max((offer.header.serial for offer in await world.bus.read_offers(0)), default=0)

    while not (before := await newest()):
        await asyncio.sleep(0.1)
    learner.fails = True
    await asyncio.sleep(3)  # longer than a read of the tape waits
    learner.fails, learner.refused, steps = False, refused, learner.rounds.steps
    while await newest() == before:
        await asyncio.sleep(0.1)
    assert learner.rounds.steps - steps < 50
    await end(learner)
    world.stop.set()


def test_an_outage_of_all_syncers_for_a_minute_of_five_costs_at_most_five_points() -> None:
    """Without renewal it cost 18: nearly all that was trained in it."""
    usual = Deployment(learners=2, fragments=2, steps=750)
    shares = []
    for deployment in (usual, replace(usual, outage=(119.0, 60.0))):
        found = totals_of(deployment)
        assert not found.lost["unaccounted"]
        shares.append(found.merged / found.tokens)
    print(f"merged {shares}")
    assert shares[1] >= shares[0] - 0.05
