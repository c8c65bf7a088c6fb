"""What `ports.Bus` promises about moments asked for and offered, on every adapter. Real time, short windows."""

import asyncio

import msgpack
import pytest

from diloco.pipeline.bus.ports import Bus, MomentsBoard
from diloco.pipeline.errors import BadMessage, BusFull
from diloco.pipeline.messages.moments import MomentsOffer
from diloco.pipeline.payload.codec import decode, encode
from tests import samples
from tests.backdoor import Backdoor

A, B = "aa" * 8, "bb" * 8
NOTHING = MomentsBoard(wish=None, claimed=False, offer=None)


async def test_a_wish_is_set_once_and_expires(bus: Bus, backdoor: Backdoor) -> None:
    """The second who asks neither replaces nor prolongs the first one's wish."""
    assert await bus.read_moments() == NOTHING
    await bus.ask_moments(samples.moments_wish("l0"), 50)
    await bus.ask_moments(samples.moments_wish("l1"), 5000)
    assert (await bus.read_moments()).wish == samples.moments_wish("l0")
    assert 40 < (backdoor.ttl_s(bus.keys.moments_wish) or 0) <= 50
    backdoor.delete(bus.keys.moments_wish)
    await bus.ask_moments(samples.moments_wish("l1"), 0.1)
    await asyncio.sleep(0.15)
    assert await bus.read_moments() == NOTHING


async def test_one_peer_at_a_time_answers_a_wish(bus: Bus) -> None:
    """A dead donor's claim lapses, and another one's takes its place."""
    assert await bus.claim_moments(A, 0.15)
    assert not await bus.claim_moments(B, 10)
    assert (await bus.read_moments()).claimed
    await asyncio.sleep(0.2)
    assert await bus.claim_moments(B, 10)
    assert not await bus.claim_moments(A, 10)


async def test_an_offer_counts_only_while_its_claim_is_held_and_ends_wish_and_claim(bus: Bus) -> None:
    late, good = samples.moments_offer(nonce=A), samples.moments_offer(learner="l1", nonce=B)
    await bus.ask_moments(samples.moments_wish("l0"), 50)
    assert not await bus.finish_moments(late, 50)
    assert await bus.claim_moments(B, 50)
    assert not await bus.finish_moments(late, 50)
    assert await bus.read_moments() == MomentsBoard(wish=samples.moments_wish("l0"), claimed=True, offer=None)
    assert await bus.finish_moments(good, 50)
    assert await bus.read_moments() == MomentsBoard(wish=None, claimed=False, offer=good)


async def test_an_offer_expires(bus: Bus) -> None:
    await bus.claim_moments(A, 50)
    assert await bus.finish_moments(samples.moments_offer(nonce=A), 0.1)
    await asyncio.sleep(0.15)
    assert await bus.read_moments() == NOTHING


async def test_what_a_learner_writes_over_wish_claim_and_offer_is_gone_in_two_minutes(
    bus: Bus, backdoor: Backdoor
) -> None:
    """Garbage is as good as none, and whoever looks gives it an end: else nobody would be given moments any more."""
    names = [bus.keys.moments_wish, bus.keys.moments_claim, bus.keys.moments_offer]
    for name in names:
        backdoor.plant(name, "string")
    assert await bus.read_moments() == MomentsBoard(wish=None, claimed=True, offer=None)
    assert all(110 < (backdoor.ttl_s(name) or 0) <= 120 for name in names)
    backdoor.delete(bus.keys.moments_wish)
    await bus.ask_moments(samples.moments_wish("l0"), 5000)
    assert (await bus.read_moments()).wish == samples.moments_wish("l0")
    assert (backdoor.ttl_s(bus.keys.moments_wish) or 999) <= 120


async def test_full_memory_refuses_wishes_and_offers(bus: Bus, backdoor: Backdoor) -> None:
    await bus.claim_moments(A, 50)
    backdoor.fill_memory()
    before = backdoor.dump()
    for call in (
        bus.ask_moments(samples.moments_wish("l0"), 50),
        bus.finish_moments(samples.moments_offer(nonce=A), 50),
    ):
        with pytest.raises(BusFull):
            await call
    assert backdoor.dump() == before


@pytest.mark.parametrize("key", ["moments_wish", "moments_claim", "moments_offer"])
async def test_a_key_of_another_type_is_reported_and_left_alone(bus: Bus, backdoor: Backdoor, key: str) -> None:
    await bus.claim_moments(A, 50)
    backdoor.plant(getattr(bus.keys, key), "hash")
    before = backdoor.dump()
    calls = [bus.read_moments(), bus.finish_moments(samples.moments_offer(nonce=A), 50)]
    calls += [bus.ask_moments(samples.moments_wish("l0"), 50)] if key == "moments_wish" else []
    calls += [bus.claim_moments(A, 50)] if key == "moments_claim" else []
    for call in calls:
        with pytest.raises(BadMessage):
            await call
    assert backdoor.dump() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("numbers", ((float("nan"),),)),
        ("kind", {"optimizer": "x", "moments": ("a:b",), "numbers": ()}),
        ("kind", {"optimizer": "x", "moments": ("a",) * 17, "numbers": ()}),
        ("nonce", "no nonce"),
    ],
)
def test_an_offer_out_of_bounds_is_refused(field: str, value: object) -> None:
    good = samples.moments_offer()
    assert decode(MomentsOffer, encode(good)) == good
    with pytest.raises(BadMessage, match=field):
        decode(MomentsOffer, msgpack.packb(good.model_dump() | {field: value}))
    with pytest.raises(BadMessage, match="100001"):
        decode(MomentsOffer, msgpack.packb(good.model_dump() | {"numbers": ((1.0,) * 100_001,)}))
