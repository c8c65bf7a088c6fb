"""Globals as updates: the step that is quantized is the step that is taken, by all alike."""

import asyncio
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.bus.commits import Published, Staged
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.fragments import FragmentLayout, layout_of
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.payload import Update
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.messages.tape import Committed, Rejected
from diloco.pipeline.payload.codec import as_bytes, as_vector, payload_digest
from diloco.pipeline.payload.quantize import GROUP, Quantized, encode
from diloco.pipeline.transfer.global_format import Held, Momentum
from diloco.pipeline.transfer.global_int8 import KEPT_UPDATES, updates_after
from diloco.pipeline.transfer.payloads import pull_exact, pull_shown, pull_state, push
from diloco.pipeline.transfer.updates import CodedStep, advance, gather
from diloco.syncer.committing import Staging
from diloco.syncer.merging.fragment import Draft, outer_step
from diloco.syncer.merging.merge import delta_norms
from diloco.syncer.merging.outer import NesterovStep
from diloco.syncer.merging.repair import LOOK_S, UNFOLLOWED_S
from diloco_studies.strikes.growth import kind_of
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time, inline
from tests import samples
from tests.syncer.test_several_syncers import until
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

NONCE = "ab" * 8
RANDOM = np.random.default_rng(0)


def some(elements: int, size: float = 1.0) -> np.ndarray:
    return (size * RANDOM.standard_normal(elements)).astype(np.float32)


def layout(elements: int, matrix: bool = False) -> FragmentLayout:
    shape = (elements // 100, 100) if matrix else (elements,)
    tensors = [
        TensorSpec(name="a", shape=shape, dtype="float32", rule="rda", fragment=0, matrix=matrix),
        TensorSpec(name="b", shape=(333,), dtype="float32", rule="mean", fragment=0),
    ]
    return layout_of(tensors).fragments[0]


# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 600, GROUP, 2 * GROUP + 5])
def test_who_makes_an_update_and_who_follows_it_have_the_same_bits(elements: int) -> None:
    """Values and momentum, however the steps come in; learners' own arrays stay as they are."""
    theta, momentum, steps = some(elements), some(elements), some(elements, 0.01)
    for before in (momentum, None):
        made, after = steps.copy(), np.empty(elements, np.float32)
        coded = CodedStep(elements, 1024)
        coder = coded.coder(theta, 0.7, Momentum(before, after, 0.6))
        for stop in range(0, elements, 50_000):
            coder.written(made, stop)
        assert coder.written(made, elements) == elements
        update = as_vector(np.frombuffer(bytes(coded.payload._data), np.uint8), elements, "int8")
        due, kept = (made.tobytes(), after.tobytes()), (theta.copy(), momentum.copy())
        found, followed = advance(theta, before, update, (0.7, 0.6))
        assert (found.tobytes(), followed.tobytes()) == due
        assert (theta.tobytes(), momentum.tobytes()) == (kept[0].tobytes(), kept[1].tobytes())
        own = theta.copy(), None if before is None else before.copy()
        found, followed = advance(*own, update, (0.7, 0.6), True)
        assert (found.tobytes(), followed.tobytes()) == due
        assert found is own[0]
        assert before is None or followed is own[1]
        # A code is the nearest to its step.
        largest = np.abs(steps).max()
        assert np.abs((theta - made) - steps).max() <= largest / 127 * (0.5 + 2**-7) + 1e-6


def test_the_momentum_is_nesterovs_of_the_pseudogradient_that_the_taken_step_says() -> None:
    """Over many steps: the same as if learners had trained what was taken, so nothing adds up in it."""
    lr, mu, elements = 0.7, 0.6, 600
    theta, b = np.zeros(elements, np.float32), None
    exact_theta, exact = np.zeros(elements, np.float64), np.zeros(elements, np.float64)
    for _ in range(50):
        d = some(elements)
        before = np.zeros(elements) if b is None else b.astype(np.float64)
        step = np.copy(d)
        NesterovStep(None, Momentum(b, np.empty(elements, np.float32), mu), step, lr).block(0, elements)
        update = Quantized(encode(step, "int8"), elements, "int8")
        taken = update[0:elements].astype(np.float64)
        theta, b = advance(theta, b, update, (lr, mu))
        implied = (taken / lr - mu * mu * before) / (1 + mu)
        np.testing.assert_allclose(b, mu * before + implied, atol=1e-5)
        np.testing.assert_allclose(implied, d, atol=np.abs(taken).max() / 127 / lr)
        exact = mu * exact + d
        exact_theta -= lr * (d + mu * exact)
    assert np.linalg.norm(b - exact) < 0.01 * np.linalg.norm(exact)
    assert np.linalg.norm(theta - exact_theta) < 0.01 * np.linalg.norm(exact_theta)


@pytest.mark.parametrize("outer", ["nesterov", "halley"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_outer_step_is_the_quantized_one(outer: str, momentum: float) -> None:
    """Of a fragment of several groups; with a recorded orthogonalised step the replay has the same bits."""
    of = layout(150_000, outer != "nesterov")
    sync = sync_spec(global_codec="int8", outer=outer, outer_momentum=momentum)
    plain = sync.model_copy(update={"global_codec": "fp32"})
    theta, before = some(of.elements), some(of.elements, 0.01) if momentum else None
    deltas = [some(of.elements, 0.01) for _ in range(3)]
    norms = [delta_norms(of, delta) for delta in deltas]
    given = (of, sync, (0.7, momentum), theta, before, deltas, norms, (1.0, 0.5, 2.0))
    draft = Draft(of, sync)
    made = outer_step(*given, draft=draft)
    uploads = draft.uploads(-of.id % sync.key_frame_interval)
    exact = outer_step(of, plain, *given[2:])
    wire = np.frombuffer(bytes(uploads["update"]._data), np.uint8)
    update = as_vector(wire, of.elements, "int8")
    assert payload_digest(as_bytes(wire), 1024) == uploads["update"].digest
    assert made.theta.tobytes() == (theta - update[0 : of.elements]).tobytes()
    assert made.theta.tobytes() == advance(theta, None, update)[0].tobytes()
    assert draft.digest == uploads["global"].digest == payload_digest(as_bytes(made.theta), 1024)
    assert np.linalg.norm(made.theta - exact.theta) < np.linalg.norm(exact.theta - theta) / 50
    if outer != "nesterov" and momentum:
        merged = as_vector(np.frombuffer(bytes(uploads["merged"]._data), np.uint8), of.elements, "int8")
        assert made.momentum.tobytes() == gather(before, momentum, merged).tobytes()
        mine, due = made.momentum, exact.momentum
        assert np.linalg.norm(mine - due) < 0.02 * np.linalg.norm(due)
        again = outer_step(*given, recorded=made.reduced.directions, recorded_step=made.orthogonal)
        assert again.theta.tobytes() == made.theta.tobytes()
    elif momentum:
        assert made.momentum.tobytes() == advance(theta, before, update, (0.7, momentum))[1].tobytes()
        mine, due = made.momentum, exact.momentum
        assert np.linalg.norm(mine - due) < 0.02 * np.linalg.norm(due)
    else:
        assert made.momentum is None


# --- on the bus --------------------------------------------------------------------------------------

ELEMENTS = 600
SYNC = sync_spec(global_codec="int8", outer_momentum=0.5, outer_lr=0.7)


class Chain:
    """A bus with a key frame, four versions after it, and what they are."""

    def __init__(self) -> None:
        self.bus = MemoryBus("r", VirtualClock())
        self.theta, self.momenta = [some(ELEMENTS)], [some(ELEMENTS, 0.1)]
        self.updates: list[Update] = []

    async def head(self) -> Head:
        frame = await push(self.bus, self.bus.keys.global_payload(0, 3, NONCE), self.theta[0], 1024, 60)
        momentum = await push(self.bus, self.bus.keys.momentum_payload(0, 3, NONCE), self.momenta[0], 1024, 60)
        for i in range(4):
            wire, averaged = encode(some(ELEMENTS, 0.01), "int8"), i == 1
            staged = await push(self.bus, self.bus.keys.update_payload(0, 4 + i, NONCE), wire, 1024, 60)
            base = payload_digest(as_bytes(self.theta[-1]), 1024)
            self.updates.append(Update(payload=staged.key, chunks=staged.chunks, base=base, averaged=averaged))
            outer = None if averaged else (0.7, 0.5)
            theta, after = advance(self.theta[-1], self.momenta[-1], Quantized(wire, ELEMENTS, "int8"), outer)
            self.theta.append(theta)
            self.momenta.append(None if averaged else after)
        return samples.head(
            version=7,
            digest=payload_digest(as_bytes(self.theta[-1]), 1024),
            payload=frame.key,
            chunks=frame.chunks,
            momentum=momentum.key,
            updates=tuple(self.updates),
            behind=4,
        )

    def held(self, at: int) -> Held:
        return Held(3 + at, payload_digest(as_bytes(self.theta[at]), 1024), self.theta[at])


def reading(bus: MemoryBus) -> list[str]:
    """Keys of the payloads that are read from now on."""
    read: list[str] = []
    original = bus.read_chunks

    async def read_chunks(key: str, *args: Any, **more: Any) -> Any:
        if key not in read:
            read.append(key)
        return await original(key, *args, **more)

    bus.read_chunks = read_chunks  # type: ignore[method-assign]
    return read


@in_virtual_time
async def test_a_learner_pulls_what_it_lacks_and_whoever_has_nothing_the_key_frame_too() -> None:
    chain = Chain()
    head = await chain.head()
    frame, updates = head.payload, [update.payload for update in head.updates]
    for at in range(4):
        read, before = reading(chain.bus), chain.theta[at].copy()
        values = await pull_shown(chain.bus, head, ELEMENTS, SYNC, inline, held=chain.held(at))
        assert values.tobytes() == chain.theta[-1].tobytes()
        assert read == updates[at:]
        assert chain.theta[at].tobytes() == before.tobytes(), "deltas are measured from it"
    strangers = [None, chain.held(4)._replace(version=9), chain.held(3)._replace(digest=bytes(16))]
    for held in (*strangers, chain.held(2)._replace(version=1)):
        read = reading(chain.bus)
        values = await pull_shown(chain.bus, head, ELEMENTS, SYNC, inline, held=held)
        assert values.tobytes() == chain.theta[-1].tobytes()
        assert read == [frame, *updates]
    exact = await pull_exact(chain.bus, head, ELEMENTS, SYNC, inline)
    assert exact.tobytes() == chain.theta[-1].tobytes()


@in_virtual_time
async def test_who_takes_over_has_values_and_momentum_bit_for_bit() -> None:
    """The momentum begins anew at a step that only averaged."""
    chain = Chain()
    head = await chain.head()
    theta, after = await pull_state(chain.bus, head, ELEMENTS, SYNC, inline)
    assert theta.tobytes() == chain.theta[-1].tobytes()
    assert after.tobytes() == chain.momenta[-1].tobytes()
    short = head.model_copy(
        update={"version": 5, "digest": head.updates[2].base, "updates": head.updates[:2], "behind": 2}
    )
    theta, after = await pull_state(chain.bus, short, ELEMENTS, SYNC, inline)
    assert theta.tobytes() == chain.theta[2].tobytes()
    assert after is None


@pytest.mark.parametrize("lost", ["the last", "an earlier one"])
@in_virtual_time
async def test_a_learner_that_cannot_follow_takes_the_key_frame(lost: str) -> None:
    """Where updates before a key frame have gone, or led elsewhere."""
    chain = Chain()
    head = await chain.head()
    # The key frame is of version 6: it lacks the last update only.
    frame = await push(chain.bus, chain.bus.keys.global_payload(0, 6, NONCE), chain.theta[3], 1024, 60)
    head = head.model_copy(update={"payload": frame.key, "behind": 1})
    gone = head.updates[1 if lost == "an earlier one" else 3].payload
    chain.bus.store.delete(gone)
    if lost == "an earlier one":
        values = await pull_shown(chain.bus, head, ELEMENTS, SYNC, inline, held=chain.held(0))
        assert values.tobytes() == chain.theta[-1].tobytes()
        wrong = chain.held(2)._replace(values=chain.theta[0])  # its digest is not that of its values
        values = await pull_shown(chain.bus, head, ELEMENTS, SYNC, inline, held=wrong)
        assert values.tobytes() == chain.theta[-1].tobytes()
    else:
        for pulling in (
            pull_shown(chain.bus, head, ELEMENTS, SYNC, inline, held=chain.held(3)),
            pull_exact(chain.bus, head, ELEMENTS, SYNC, inline),
            pull_state(chain.bus, head, ELEMENTS, SYNC, inline),
        ):
            with pytest.raises(BadPayload):
                await pulling


@in_virtual_time
async def test_values_that_are_not_the_heads_are_not_taken() -> None:
    chain = Chain()
    head = (await chain.head()).model_copy(update={"digest": bytes(16)})
    for pulling in (
        pull_shown(chain.bus, head, ELEMENTS, SYNC, inline, held=chain.held(3)),
        pull_exact(chain.bus, head, ELEMENTS, SYNC, inline),
        pull_state(chain.bus, head, ELEMENTS, SYNC, inline),
    ):
        with pytest.raises(BadPayload, match="does not match its head"):
            await pulling


def test_a_head_whose_key_frame_lacks_more_than_there_is_does_not_decode() -> None:
    update = Update(payload="u", chunks=1, base=bytes(16), averaged=False)
    with pytest.raises(ValueError, match="2 updates behind, and 1 are there"):
        Head(**samples.head(updates=(update,)).model_dump() | {"behind": 2})
    assert updates_after(samples.head(version=1, updates=(update,)), Held(0, bytes(16), some(3))) == (update,)


# --- what an owner keeps there -----------------------------------------------------------------------


@in_virtual_time
async def test_after_a_rewind_nothing_is_retired_that_is_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lost commits had replaced may be what the head names: then it is not among what must go early."""
    monkeypatch.setattr("diloco.syncer.committing.REPLACED_BYTES", 0)
    of = layout(1000)
    staging = Staging(MemoryBus("r", VirtualClock()), VirtualClock(), of, SYNC, lambda n: "0" * 2 * n)

    def led(*names: str) -> tuple[Update, ...]:
        return tuple(Update(payload=name, chunks=1, base=bytes(16), averaged=False) for name in names)

    def head(*names: str) -> Head:
        return samples.head(payload="frame", updates=led(*names), behind=0)

    def now(*names: str, frame: str = "frame") -> Published:
        return Published(Staged(frame, 1), None, None, led(*names), 0)

    staging.retire(head("1", "2", "3", "4"), now("2", "3", "4", "5"))
    assert staging.retire(head("2", "3", "4", "5"), now("3", "4", "5", "6", frame="new frame")) == ("1",)
    # Both are lost with the bus: it names "1" to "4" and the first frame again.
    assert staging.retire(head("1", "2", "3", "4"), now("2", "3", "4", "5'")) == ()
    assert set(staging.retire(head("2", "3", "4", "5'"), now("3", "4", "5'", "6'"))) <= {"1"}


@pytest.mark.parametrize(("fragments", "kept"), [(1, 8), (2, 4), (8, 1), (100, 1)])
@in_virtual_time
async def test_replaced_globals_of_all_fragments_share_a_bound_and_each_keeps_one(
    fragments: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of the one before last could only train what is too stale to be merged."""
    of, sync = layout(1000), samples.sync_spec(fragments=fragments)
    monkeypatch.setattr("diloco.syncer.committing.REPLACED_BYTES", 8 * 4 * of.elements)
    staging = Staging(MemoryBus("r", VirtualClock()), VirtualClock(), of, sync, lambda n: "0" * 2 * n)
    for version in range(20):
        head = samples.head(payload=f"global-{version}", momentum="")
        went = staging.retire(head, Published(Staged(f"global-{version + 1}", 1), None, None, (), 0))
        assert went == ((f"global-{version - kept}",) if version >= kept else ())


# --- runs --------------------------------------------------------------------------------------------


class Counting(VirtualLearner):
    """Notes what it pulls of globals."""

    def connect(self) -> MemoryBus:
        bus = super().connect()
        self.pulled = reading(bus)
        return bus


def begun(**changes: Any) -> VirtualRun:
    """With globals as updates unless told otherwise, and endless."""
    world = VirtualRun(sync_spec(**{"global_codec": "int8", "outer_momentum": 0.5, "tokens": 10**9} | changes))
    world.start_syncer()
    return world


async def settled(world: VirtualRun, *learners: VirtualLearner) -> list[Head]:
    """Heads once nobody trains any more."""
    await end(*learners)
    await asyncio.sleep(1)
    return await world.heads()


@pytest.mark.parametrize("changes", [{}, {"outer": "halley"}, {"outer_warmup": 3}, {"outer_momentum": 0.0}], ids=str)
@in_virtual_time
async def test_versions_go_on_as_updates_with_a_key_frame_every_few(changes: dict[str, Any]) -> None:
    """Learners that are there pull updates alone; who joins late has the same values; a taker's are the owner's."""
    world = begun(key_frame_interval=4, **changes)
    learner = Counting("l0", world).start()
    await world.until_version(18)
    late = Counting("l1", world, incarnation="1" * 16).start()
    await world.until_version(22)
    frames = [one for one in learner.pulled if kind_of(one) == "global"]
    assert [one.split(":")[-2] for one in frames] == ["0", "0"], "one for each fragment, at the start"
    assert {kind_of(one) for one in learner.pulled} == {"global", "update"}
    assert kind_of(late.pulled[0]) == "global"
    for head in await settled(world, learner, late):
        of = layout_of(world.spec.tensors).fragments[head.fragment]
        assert 0 <= head.behind < 4
        assert (head.version + head.fragment - head.behind) % 4 == 0
        assert head.behind <= len(head.updates) == KEPT_UPDATES
        theta, momentum = await pull_state(world.bus, head, of.elements, world.spec.sync, inline)
        assert payload_digest(as_bytes(theta), 1024) == head.digest
        owner = world.service.owners[head.fragment]
        assert owner.loaded.fragment.theta.tobytes() == theta.tobytes()
        mine = owner.loaded.fragment.momentum
        if world.spec.sync.outer_momentum:
            assert mine.tobytes() == momentum.tobytes()
        else:
            assert mine is momentum is None
        named = {head.payload, head.momentum, *(update.payload for update in head.updates)} - {""}
        assert named.isdisjoint(world.store.expiries)
    kept = [key for key in world.store.values if ":update:" in key or ":global:" in key]
    assert len([key for key in kept if key not in world.store.expiries]) == 2 * (1 + KEPT_UPDATES)


def damage(world: VirtualRun, key: str) -> None:
    """Another element's code, with digests that are right for it: nobody who looks at the payload alone sees it."""
    stream = world.store.values[key]
    count = sum(f.elements for f in layout_of(world.spec.tensors).fragments if f"update:{f.id}:" in key)
    stream.data[:] = list(samples.encode_chunks(encode(np.ones(count, np.float32), "int8"), 1024))


class Unlucky(VirtualLearner):
    """The update to version 9 of fragment 0 is damaged when it is first read."""

    damaged = False

    def connect(self) -> MemoryBus:
        bus, original = super().connect(), MemoryBus.read_chunks

        async def read_chunks(key: str, *args: Any, **more: Any) -> Any:
            if ":update:0:9:" in key and not Unlucky.damaged:
                Unlucky.damaged = True
                damage(self.world, key)
            return await original(bus, key, *args, **more)

        bus.read_chunks = read_chunks  # type: ignore[method-assign]
        return bus


@pytest.mark.parametrize("joining", [False, True])
@in_virtual_time
async def test_an_update_that_leads_elsewhere_holds_up_its_fragment_for_a_while_only(joining: bool) -> None:
    """Its owner sees that no live learner can follow, one that joins included, and publishes the version whole."""
    world = begun(key_frame_interval=64)
    Unlucky.damaged = False
    learners = [Unlucky(f"l{i}", world, incarnation=str(i) * 16).start() for i in range(2)]
    await until(lambda: Unlucky.damaged, 60)
    if joining:
        await end(*learners)
        learners = [Unlucky("l2", world, incarnation="2" * 16).start()]
    await asyncio.sleep(UNFOLLOWED_S / 2)
    stuck, other = await world.heads()
    assert stuck.version == 9
    assert joining or other.version > 12
    await world.until_version(12, 2 * UNFOLLOWED_S)
    await settled(world, *learners)


@pytest.mark.parametrize("lost", ["update", "earlier update", "key frame", "momentum"])
@in_virtual_time
async def test_what_is_lost_is_published_anew_and_the_run_goes_on(lost: str) -> None:
    """While no learner can follow, and none is merged: nothing of what they train is lost but what they overwrite."""
    world = begun(key_frame_interval=64)
    learners = [VirtualLearner(f"l{i}", world, incarnation=str(i) * 16).start() for i in range(2)]
    await world.until_version(9)
    await end(*learners)
    await asyncio.sleep(2)
    heads = await world.heads()
    for head in heads:
        which = {"update": head.updates[-1].payload, "earlier update": head.updates[-2].payload}
        which |= {"key frame": head.payload, "momentum": head.momentum}
        world.store.delete(which[lost])
    learner = VirtualLearner("l2", world, incarnation="2" * 16).start()
    await world.until_version(max(head.version for head in heads) + 3, 3 * LOOK_S)
    await asyncio.sleep(2 * LOOK_S)
    for head in await settled(world, learner):
        of = layout_of(world.spec.tensors).fragments[head.fragment]
        theta, momentum = await pull_state(world.bus, head, of.elements, world.spec.sync, inline)
        owner = world.service.owners[head.fragment]
        assert (theta.tobytes(), momentum.tobytes()) == (
            owner.loaded.fragment.theta.tobytes(),
            owner.loaded.fragment.momentum.tobytes(),
        )


@in_virtual_time
async def test_what_is_lost_while_merges_go_on_holds_them_up_for_a_moment() -> None:
    """The next commit is refused; what it would name is published anew, and the same deltas are merged."""
    world = begun(key_frame_interval=64)
    learner = VirtualLearner("l0", world).start()
    await world.until_version(9)
    for head in await world.heads():
        world.store.delete(head.updates[-2].payload)
    await world.until_version(12, LOOK_S / 2)
    await settled(world, learner)
    merged = [one for one in await world.tape() if isinstance(one, Committed) and one.contributions]
    assert not any(isinstance(one, Rejected) for one in await world.tape())
    assert len({(one.fragment, one.version) for one in merged}) == len(merged)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@in_virtual_time
async def test_a_global_that_is_lost_is_published_anew_in_any_codec(codec: str) -> None:
    world = begun(global_codec=codec)
    learner = VirtualLearner("l0", world).start()
    await world.until_version(3)
    for head in await settled(world, learner):
        world.store.delete(head.payload)
    await asyncio.sleep(2 * LOOK_S)
    for head in await world.heads():
        of = layout_of(world.spec.tensors).fragments[head.fragment]
        theta, _ = await pull_state(world.bus, head, of.elements, world.spec.sync, inline)
        assert theta.tobytes() == world.service.owners[head.fragment].loaded.fragment.theta.tobytes()
