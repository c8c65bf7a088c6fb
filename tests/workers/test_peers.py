"""Promises about moments from a peer: real peers on the memory bus, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.moments import MomentsWish, OptimizerKind
from diloco.pipeline.messages.run import Phase
from diloco.workers.moments import peers as module
from diloco.workers.moments.peers import Peers
from diloco.workers.moments.saved_moments import Moments
from diloco.workers.times import TIMES
from diloco_studies.virtual.memory import MemoryBus, MemoryStore
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time
from tests import samples

LAYOUT = layout_of(samples.spec().tensors)
ADAM = OptimizerKind(optimizer="torch.AdamW", moments=("exp_avg", "exp_avg_sq"), numbers=("step",))
CHUNK_BYTES = 1024


def moments(value: float) -> Moments:
    flats = tuple(
        {name: np.full(fragment.elements, value, np.float32) for name in ADAM.moments} for fragment in LAYOUT.fragments
    )
    return Moments(ADAM, flats, {"step": (value,) * 3})


def value_of(found: Moments | None) -> float | None:
    return None if found is None else float(found.flats[0]["exp_avg"][0])


class Counting(MemoryBus):
    """A memory bus that counts calls and may break in them."""

    def __init__(self, world: "World") -> None:
        super().__init__("run", VirtualClock(), world.store)
        self.world = world
        self.dead_after: int | None = None

    async def write_chunks(self, key: str, *args: Any) -> None:
        await asyncio.sleep(self.world.chunk_s)
        if self.dead_after is not None:
            self.dead_after -= 1
            if self.dead_after < 0:
                raise BusUnavailable("the donor is dead")
        self.world.uploads.add(key)
        await super().write_chunks(key, *args)

    async def ask_moments(self, *args: Any) -> None:
        self.world.asked += 1
        await super().ask_moments(*args)


class World:
    """A store, and whoever a test puts into it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.uploads: set[str] = set()
        self.asked = 0
        self.chunk_s = 0.0
        self.run = samples.run_state()
        """What parties are in that are made from now on."""
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def party(self, name: str, kind: OptimizerKind = ADAM) -> Peers:
        self.bus, run = Counting(self), self.run
        return Peers(self.bus, VirtualClock(), name, LAYOUT, kind, CHUNK_BYTES, lambda: run)

    async def trains(self, name: str, value: float, steps: int = 100, kind: OptimizerKind = ADAM) -> Counting:
        """A peer that trains on, and answers wishes with moments of one value."""

        async def take() -> Moments:
            await asyncio.sleep(0.2)  # until its next step boundaries
            return moments(value)

        return await self.gives(name, take, steps, kind)

    async def gives(
        self, name: str, take: Callable[[], Awaitable[Moments | None]], steps: int = 500, kind: OptimizerKind = ADAM
    ) -> Counting:
        """A peer that answers wishes with what it takes."""
        peer, bus = self.party(name, kind), self.bus
        await bus.write_report(samples.report(name, step=steps))
        self.tasks[name] = asyncio.create_task(peer.answer(lambda: steps, take))
        return bus

    async def kill(self, name: str) -> None:
        self.tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await self.tasks.pop(name)

    async def timed(self, call: Awaitable[Moments | None]) -> tuple[float | None, float]:
        """Value of what was found, and seconds it took."""
        began = asyncio.get_running_loop().time()
        return value_of(await call), asyncio.get_running_loop().time() - began


@in_virtual_time
async def test_a_learner_takes_the_moments_of_a_live_peer() -> None:
    """Within a few seconds, numbers included."""
    world = World()
    await world.trains("l0", 3.0)
    began = asyncio.get_running_loop().time()
    found = await world.party("l1").ask()
    assert value_of(found) == 3.0
    assert found is not None
    assert found.numbers == {"step": (3.0,) * 3}
    assert [set(flats) for flats in found.flats] == [{"exp_avg", "exp_avg_sq"}] * 2
    assert asyncio.get_running_loop().time() - began < 2.5


@in_virtual_time
async def test_however_often_somebody_joins_the_bus_holds_two_offers_at_most() -> None:
    """What the syncer counts on when it judges the memory of a Redis."""
    world = World()
    bus = await world.trains("l0", 3.0)
    most = 0
    for number in range(60):
        await bus.write_report(samples.report("l0", step=500))
        assert value_of(await world.party(f"l{number + 1}").ask()) == 3.0
        for _ in range(10):
            await asyncio.sleep(1.0)
            now = asyncio.get_running_loop().time()
            held = [key for key in list(world.store.values) if "moments:" in key]
            most = max(most, sum(world.store.get(key, object, now) is not None for key in held))
    assert most == 2 * len(LAYOUT.fragments) * len(ADAM.moments)


@in_virtual_time
async def test_several_that_ask_at_once_are_served_by_one_upload() -> None:
    """Two donors, three askers: each payload is written once."""
    world = World()
    await world.trains("l0", 3.0)
    await world.trains("l1", 4.0)
    found = await asyncio.gather(*(world.party(name).ask() for name in ("l2", "l3", "l4")))
    assert len({value_of(one) for one in found}) == 1
    assert None not in found
    assert len(world.uploads) == 4


@in_virtual_time
async def test_a_wish_that_came_too_late_for_an_offer_causes_no_second_upload() -> None:
    """Set between a look at the bus and the announcement: the offer that is there serves it too."""
    world = World()
    await world.trains("l0", 3.0)
    assert value_of(await world.party("l1").ask()) == 3.0
    await world.bus.ask_moments(MomentsWish(learner="l2", kind=ADAM), TIMES.moments_offer_ttl_s)
    await asyncio.sleep(TIMES.moments_offer_ttl_s / 2)
    assert len(world.uploads) == 4


@in_virtual_time
async def test_nobody_is_asked_where_nobody_trains() -> None:
    """No peer, one that has left, and ones too young to have moments: no wish, no waiting."""
    world = World()
    bus = world.party("l9")
    assert await world.timed(bus.ask()) == (None, 0.0)
    await world.bus.write_report(samples.report("l0", step=500, left=True))
    await world.bus.write_report(samples.report("l1", step=module.USEFUL_STEPS - 1))
    await world.bus.write_report(samples.report("l9", step=500))
    assert await world.timed(world.party("l9").ask()) == (None, 0.0)
    assert not world.asked


@in_virtual_time
async def test_without_an_answer_the_wait_is_short() -> None:
    world = World()
    await world.trains("l0", 3.0)
    await world.kill("l0")
    found, took_s = await world.timed(world.party("l1").ask())
    assert found is None
    assert TIMES.moments_unclaimed_s - 0.1 < took_s < TIMES.moments_unclaimed_s + 1


@pytest.mark.parametrize("leaves", ["the donor", "the run"])
@in_virtual_time
async def test_nobody_waits_for_a_peer_that_leaves_nor_in_a_run_that_ends(leaves: str) -> None:
    """Within a look or two, not after the time that a live peer has to answer."""
    world = World()
    await world.trains("l0", 3.0)
    await world.kill("l0")
    asking = asyncio.create_task(world.timed(world.party("l1").ask()))
    await asyncio.sleep(0.5)
    assert world.asked == 1
    if leaves == "the donor":
        await world.bus.write_report(samples.report("l0", step=500, left=True))
    else:
        await world.bus.write_state(samples.run_state(phase=Phase.DRAINING))
    found, took_s = await asking
    assert found is None
    assert took_s < 0.5 + 3 * TIMES.poll_s


@in_virtual_time
async def test_an_offer_survives_its_donor_and_expires() -> None:
    world = World()
    await world.trains("l0", 3.0)
    assert value_of(await world.party("l1").ask()) == 3.0
    await world.kill("l0")
    await world.bus.write_report(samples.report("l5", step=500))
    await asyncio.sleep(BUS_TIMES.live_s - 1)
    assert await world.timed(world.party("l2").ask()) == (3.0, 0.0)
    await asyncio.sleep(TIMES.moments_offer_ttl_s)
    await world.bus.write_report(samples.report("l5", step=500))
    assert value_of(await world.party("l3").ask()) is None
    await asyncio.sleep(TIMES.moments_payload_ttl_s)
    now = asyncio.get_running_loop().time()
    assert not [key for key in list(world.store.values) if "moments" in key and world.store.get(key, object, now)]


@in_virtual_time
async def test_a_donor_killed_half_way_is_replaced_and_its_half_upload_never_used() -> None:
    """Its claim lapses, another one's upload is the one announced."""
    world = World()
    first = await world.trains("l0", 3.0)
    first.dead_after = 2
    asking = asyncio.create_task(world.party("l2").ask())
    while len(world.uploads) < 2:
        await asyncio.sleep(0.01)
    await world.kill("l0")
    await world.trains("l1", 4.0)
    assert value_of(await asking) == 4.0
    assert len(world.uploads) == 2 + 4


@in_virtual_time
async def test_a_slow_upload_is_waited_for_while_its_donor_holds_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the claim's expiry and than the wait for a claim; but not for ever."""
    world = World()
    await world.trains("l0", 3.0)
    world.chunk_s = 2.0
    found, took_s = await world.timed(world.party("l1").ask())
    assert found == 3.0
    assert took_s > TIMES.moments_unclaimed_s
    await asyncio.sleep(TIMES.moments_offer_ttl_s + 1)
    world.chunk_s = 20.0
    await world.bus.write_report(samples.report("l0", step=500))
    found, took_s = await world.timed(world.party("l1").ask())
    assert found is None
    assert took_s < TIMES.moments_wait_s + 1


@in_virtual_time
async def test_another_optimizers_offer_does_not_stand_in_the_way() -> None:
    """Of two kinds of peers, those of the asker's own answer, and the others upload nothing for it."""
    world = World()
    other = ADAM.model_copy(update={"optimizer": "torch.Adam"})
    await world.trains("l0", 3.0, kind=other)
    assert value_of(await world.party("l1", other).ask()) == 3.0
    assert value_of(await world.party("l3").ask()) is None
    assert len(world.uploads) == 4
    await world.trains("l2", 4.0)
    assert value_of(await world.party("l3").ask()) == 4.0
    assert len(world.uploads) == 8


@pytest.mark.parametrize("uploading", [False, True])
@in_virtual_time
async def test_moments_of_an_earlier_run_of_the_name_are_not_taken(uploading: bool) -> None:
    """Redis was emptied, and a fresh learner began anew. One that was cut off trains on in the earlier run, and finds
    a wish of the new one before it hears of that, or had claimed one before. A peer of the new run answers it."""
    world = World()
    world.chunk_s = 2.0 * uploading
    await world.trains("l0", 3.0)
    if uploading:
        await world.bus.ask_moments(MomentsWish(learner="l9", kind=ADAM), TIMES.moments_wait_s)
        await asyncio.sleep(2.0)
        assert (await world.bus.read_moments()).claimed
    for key in list(world.store.values):
        world.store.delete(key)
    world.store.expiries.clear()
    world.chunk_s, world.run = 0.0, samples.run_state(started_unix_s=2000.0)
    await world.bus.write_report(samples.report("l5", step=500))
    found, _ = await world.timed(world.party("l1").ask())
    assert found is None
    offer = (await world.bus.read_moments()).offer
    assert offer is not None, "it was offered"
    assert offer.began_unix_s == 1000.0
    await world.trains("l6", 4.0)
    assert value_of(await world.party("l2").ask()) == 4.0


@in_virtual_time
async def test_a_negative_second_moment_is_refused() -> None:
    world = World()
    await world.trains("l0", -3.0)
    assert await world.party("l1").ask() is None
    assert len(world.uploads) == 4


@pytest.mark.parametrize("fault", ["value", "device"])
@in_virtual_time
async def test_a_donor_trains_on_whatever_its_own_moments_are(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its fault is logged, its training goes on, and another peer answers the wish."""
    world = World()

    async def take() -> Moments:
        if fault == "device":
            raise RuntimeError("the device is gone")
        return moments(float("nan"))

    await world.gives("l0", take)
    asking = asyncio.create_task(world.party("l2").ask())
    await asyncio.sleep(1.5)
    await world.trains("l1", 4.0)
    assert value_of(await asking) == 4.0
    assert not world.tasks["l0"].done()
    assert "moments_not_given" in capsys.readouterr().out


@in_virtual_time
async def test_a_learner_without_moments_to_give_claims_no_second_wish() -> None:
    """Who asked waits for another peer, or begins fresh, a claim's expiry later; the next one does not wait for it."""
    world = World()

    async def take() -> None:
        return None

    await world.gives("l0", take)
    asking = asyncio.create_task(world.party("l2").ask())
    await asyncio.sleep(1.5)
    assert world.tasks["l0"].done()
    await world.trains("l1", 4.0)
    assert value_of(await asking) == 4.0
    await world.kill("l1")
    await asyncio.sleep(TIMES.moments_offer_ttl_s)
    await world.bus.write_report(samples.report("l0", step=500))
    value, waited_s = await world.timed(world.party("l3").ask())
    assert value is None
    assert waited_s < TIMES.moments_unclaimed_s + 1


@in_virtual_time
async def test_a_donor_that_is_too_slow_says_so() -> None:
    """Else nobody would learn why joiners begin fresh; it looks for wishes again."""
    world = World()
    asked = list[float]()

    async def take() -> Moments:
        asked.append(asyncio.get_running_loop().time())
        await asyncio.sleep(10 * TIMES.moments_upload_s)
        return moments(3.0)

    with capture_logs() as log:
        await world.gives("l0", take)
        assert await world.party("l1").ask() is None
        await asyncio.sleep(TIMES.moments_upload_s)
    (told,) = [line["error"] for line in log if line["event"] == "moments_not_given"]
    assert told == "not copied and uploaded within 40 s: the learner that asked may start with fresh moments"
    assert len(asked) == 1
    assert not world.tasks["l0"].done()


@in_virtual_time
async def test_an_unreadable_offer_is_no_offer() -> None:
    """Whatever stands on the bus, the learner joins, with a peer's moments."""
    world = World()
    await world.trains("l0", 3.0)
    peer = world.party("l1")
    world.store.values[world.bus.keys.moments_offer] = b"\xc1"
    assert value_of(await peer.ask()) == 3.0
    assert not world.tasks["l0"].done()
