"""How long uploads are waited for: deadlines from measured times, learners that are gone, payloads that are here."""

import asyncio
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import RefusalReason, Rejected
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import TRAITS, held, payload_bytes
from diloco.pipeline.transfer.payloads import push
from diloco.syncer.admission import DeltaFormat, Offer, UploadProgress
from diloco.syncer.downloads import Downloads, UploadEstimator
from diloco.syncer.membership import RunWatch
from diloco.syncer.merging.fragment import FragmentState
from diloco.syncer.merging.merge import DeltaNorms
from diloco.syncer.times import TIMES
from diloco.syncer.window import Window
from diloco_studies.virtual.memory import MemoryBus, MemoryStore
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time, inline
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec, under_way

FRAGMENT = layout_of(samples.spec().tensors).fragments[0]


def downloads_on(bus: Bus, clock: VirtualClock, uploads: UploadEstimator | None = None) -> Downloads:
    wake = asyncio.Event()
    return Downloads(
        bus, clock, state(samples.sync_spec()), wake, inline, uploads or UploadEstimator(), UploadProgress()
    )


def state(sync: SyncSpec) -> FragmentState:
    return FragmentState(FRAGMENT, sync, 0, b"", np.ones(FRAGMENT.elements, np.float32), None)


def offer_of(n: int) -> Offer:
    return Offer(f"{n}-0", samples.header(f"l{n}"))


def key_of(bus: Bus, offer: Offer) -> str:
    h = offer.header
    return bus.keys.delta_payload(h.fragment, h.learner, h.incarnation, h.serial)


@pytest.mark.parametrize("uploads", [1, 8])
@in_virtual_time
async def test_timeouts_double_the_deadline_at_most(uploads: int) -> None:
    """However many in one window; without any measurement too. A network that became slow is met in a few windows."""
    clock = VirtualClock()
    measured = UploadEstimator()
    downloads = downloads_on(MemoryBus("r", clock, MemoryStore()), clock, measured)
    assert measured.upload_s == TIMES.first_upload_s
    for _ in range(3):
        before, offers = measured.upload_s, [offer_of(n) for n in range(uploads)]
        downloads.start(offers)
        await asyncio.sleep(before)
        entries = [offer.entry_id for offer in offers]
        downloads.timed_out(entries)
        assert before < measured.upload_s <= 2 * before
        downloads.forget(entries)
    await downloads.close()


@in_virtual_time
async def test_measured_uploads_shorten_the_deadline_again() -> None:
    """The first one does away with the time that an owner gives before it knows any."""
    clock, store = VirtualClock(), MemoryStore()
    bus = MemoryBus("r", clock, store)
    downloads, offer = downloads_on(bus, clock, measured := UploadEstimator()), offer_of(1)
    downloads.start([offer])
    await push(bus, key_of(bus, offer), np.zeros(FRAGMENT.elements, np.float32), 1024, 600)
    while not downloads.outcomes:
        await asyncio.sleep(0.01)
    assert measured.upload_s == TIMES.min_upload_s
    await downloads.close()


@in_virtual_time
async def test_a_payload_that_is_here_is_told_again_for_the_next_window() -> None:
    """It came while its delta was in no window: else the next one would wait for it until its deadline."""
    clock, store = VirtualClock(), MemoryStore()
    bus = MemoryBus("r", clock, store)
    downloads, offer = downloads_on(bus, clock), offer_of(1)
    await push(bus, key_of(bus, offer), np.zeros(FRAGMENT.elements, np.float32), 1024, 600)
    downloads.start([offer])
    while not downloads.outcomes:
        await asyncio.sleep(0.01)
    (first,) = downloads.ended()
    assert not downloads.outcomes
    again = Offer(offer.entry_id, offer.header)
    downloads.start([again])
    assert list(downloads.ended()) == [(again, first[1])]
    assert list(downloads.deltas) == [offer.entry_id]
    await downloads.close()


@in_virtual_time
async def test_what_was_refused_before_it_was_told_is_not_told() -> None:
    """It came after the deadline for which it was refused: its learner would otherwise count as one in time."""
    clock, store = VirtualClock(), MemoryStore()
    bus = MemoryBus("r", clock, store)
    downloads, offer = downloads_on(bus, clock), offer_of(1)
    downloads.start([offer])
    await push(bus, key_of(bus, offer), np.zeros(FRAGMENT.elements, np.float32), 1024, 600)
    while not downloads.outcomes:
        await asyncio.sleep(0.01)
    downloads.forget([offer.entry_id])
    assert list(downloads.ended()) == []
    assert not downloads.deltas
    await downloads.close()


@pytest.mark.parametrize("kind", get_args(Codec))
@in_virtual_time
async def test_what_comes_is_looked_at_where_it_came_unless_that_is_heavy(
    monkeypatch: pytest.MonkeyPatch, kind: Codec
) -> None:
    """Another thread would have to fetch it from this one's cache; a quantized payload would hold up all else here."""
    offloaded: list[str] = []
    seen: list[int] = []
    monkeypatch.setattr(DeltaNorms, "advance", lambda self, here: seen.append(len(here)))
    monkeypatch.setattr(DeltaNorms, "norms", lambda self: np.ones(len(FRAGMENT.slots)))

    async def offload(work: Callable[..., Any], *args: Any) -> Any:
        offloaded.append(work.__name__)
        return work(*args)

    clock = VirtualClock()
    bus, offer, sync = MemoryBus("r", clock, MemoryStore()), offer_of(1), samples.sync_spec(codec=kind)
    wire = np.zeros(payload_bytes(FRAGMENT.elements, kind), np.uint8)
    await push(bus, key_of(bus, offer), wire, sync.chunk_bytes, 600)
    intake = Downloads(bus, clock, state(sync), asyncio.Event(), offload, UploadEstimator(), UploadProgress())
    intake.start([offer])
    while not intake.outcomes:
        await asyncio.sleep(0.01)
    assert seen[0] == held(sync.chunk_bytes, FRAGMENT.elements, kind)
    assert len(offloaded) == (1 if TRAITS[kind].quick else 2), "and to be judged"
    await intake.close()


@in_virtual_time
async def test_an_upload_is_heard_of_while_it_grows_and_not_given_up_once_it_is_whole() -> None:
    """What counts is when something last came; judging it may take long, and is no silence."""
    clock, store = VirtualClock(), MemoryStore()
    bus = MemoryBus("r", clock, store)
    downloads, offer = downloads_on(bus, clock), offer_of(1)
    downloads.start([offer])
    began = clock.now()
    await asyncio.sleep(5.0)
    assert downloads.last_progress_s(offer) == began
    chunks: list[bytes] = []

    async def keep(key: str, first: int, more: list[bytes], ttl_s: float) -> None:
        chunks.extend(more)

    write, bus.write_chunks = bus.write_chunks, keep  # type: ignore[method-assign, assignment]
    await push(bus, key_of(bus, offer), np.zeros(FRAGMENT.elements, np.float32), 1024, 600)
    await write(key_of(bus, offer), 0, chunks[:1], 600)
    await asyncio.sleep(0.5)
    assert downloads.last_progress_s(offer) == pytest.approx(began + 5.0, abs=0.1)
    await write(key_of(bus, offer), 1, chunks[1:], 600)
    await asyncio.sleep(0.5)
    assert downloads.last_progress_s(offer) == math.inf
    await downloads.close()


@in_virtual_time
async def test_a_fresh_owner_does_not_wait_its_first_deadline_for_a_learner_that_died() -> None:
    """It has measured nothing, and would give 30 s: but the learner is silent, and its payload grows no more."""
    world, learners = await under_way(3, learners=3, quorum=2, fragments=1)
    dying, announced = learners[2], asyncio.Event()

    async def hangs(*_: Any) -> None:
        announced.set()
        await asyncio.sleep(1e6)

    dying.bus.write_chunks = hangs  # type: ignore[method-assign]
    await announced.wait()
    await world.kill_syncer()
    await dying.kill()
    (was,) = await world.versions()
    service = world.start_syncer(liveness_s=3.0)
    began = world.clock.now()
    await world.until_version(was + 2)
    assert service.owners[0].state.uploads.upload_s < TIMES.first_upload_s
    assert world.clock.now() - began < 12.0  # the dead syncer's lease, 5 s, and the liveness time twice at most
    lost = [r for r in await world.tape() if isinstance(r, Rejected) and r.learner == "l2"]
    assert all(r.reason is not RefusalReason.UPLOAD_TIMEOUT or "is gone" in r.detail for r in lost)
    await end(*learners[:2])


def test_an_upload_comes_while_its_chunks_do_or_earlier_ones_of_its_learner_do() -> None:
    """And for as long as four chunks take after the last one. What is silent, or was passed by, does not come."""
    coming, first, second, given_s = (
        UploadProgress(),
        samples.header("l1", serial=1),
        samples.header("l1", serial=2),
        30.0,
    )
    assert not coming.is_progressing(second, -math.inf, 0.0, given_s), "nothing came of its learner"
    coming.chunk_arrived(first, 10.0)
    assert coming.is_progressing(second, -math.inf, 11.0, given_s), "its turn is still to come"
    assert not coming.is_progressing(second, -math.inf, 11.1, given_s), (
        "a second of silence, and no chunk's time is known"
    )
    coming.chunk_arrived(first, 13.0)  # a chunk took three seconds
    assert coming.is_progressing(first, 13.0, 25.0, given_s)
    assert coming.is_progressing(second, -math.inf, 25.0, given_s)
    assert not coming.is_progressing(second, -math.inf, 25.1, given_s)
    coming.chunk_arrived(second, 26.0)
    assert not coming.is_progressing(first, -math.inf, 26.0, given_s), "a later one has begun: its turn has passed"


def test_how_long_an_upload_may_be_silent_is_not_its_learners_choice() -> None:
    """One long gap between two chunks is no leave to be silent for four times as long: twice the deadline bounds it."""
    coming, header = UploadProgress(), samples.header("l1", serial=1)
    for at in (0.0, 100.0):
        coming.chunk_arrived(header, at)
    assert coming.is_progressing(header, 100.0, 104.0, 2.0)
    assert not coming.is_progressing(header, 100.0, 104.1, 2.0)


def test_a_suspected_learners_upload_is_given_up_once_it_has_stopped_and_not_while_it_comes() -> None:
    """Its line would have to carry it again. Nobody waits for it, and it is merged should it be whole in time."""
    watch = RunWatch(samples.sync_spec(), liveness_s=5.0, drain_s=0.0)
    window, offer = Window(samples.head(), DeltaFormat(bytes(16), "fp32", 3), 0.0), offer_of(1)
    window.offer(offer, 0.0)
    suspected, is_progressing = frozenset({"l1"}), frozenset({offer.entry_id})

    def given_up(now: float, arriving: frozenset[str]) -> tuple[list[Offer], float | None]:
        stopped, again = watch.given_up(window, lambda _: 0.0, now, suspected, arriving)
        return [one for one, _ in stopped], again

    assert given_up(60.0, is_progressing) == ([], 65.0)
    assert given_up(4.0, frozenset()) == ([], 5.0)
    assert given_up(60.0, frozenset()) == ([offer], None)


def test_what_is_known_of_incarnations_is_bounded() -> None:
    coming = UploadProgress()
    for n in range(UploadProgress.MAX_TRACKED + 10):
        coming.chunk_arrived(samples.header("l1", incarnation=f"{n:08x}"), 0.0)
    assert len(coming._last) == UploadProgress.MAX_TRACKED


@pytest.mark.parametrize("quorum", [1, 2])
@in_virtual_time
async def test_an_upload_that_comes_slowly_is_not_refused_for_it(quorum: int) -> None:
    """Its chunks come in time, and the whole of it does not: the deadline was for a fast line. None is sent again."""
    world = VirtualRun(sync_spec(tokens=10**9, fragments=1, chunk_bytes=1024, quorum=quorum), liveness_s=5.0)
    world.spec = world.spec.model_copy(
        update={"tensors": tuple(one.model_copy(update={"shape": (4096,)}) for one in world.spec.tensors)}
    )
    world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.5, f"{i:016x}").start() for i in range(2)]
    await world.until_version(3)
    slowed = 0
    for learner in learners:
        write = learner.bus.write_chunks

        async def slowly(key: str, first: int, chunks: Any, ttl_s: float, write: Any = write) -> None:
            nonlocal slowed
            for n, chunk in enumerate(chunks, first):
                slowed += 1
                await asyncio.sleep(0.7)
                await write(key, n, [chunk], ttl_s)

        learner.bus.write_chunks = slowly  # type: ignore[method-assign]
    before = len(await world.tape())
    version = (await world.versions())[0]
    await world.until_version(version + 3, 300.0)
    assert slowed > 2 * 3, "each delta has several chunks"
    refused = [r for r in (await world.tape())[before:] if isinstance(r, Rejected)]
    assert not [r for r in refused if r.reason is RefusalReason.UPLOAD_TIMEOUT]
    await end(*learners)


@in_virtual_time
async def test_a_cancelled_download_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the cyclic collector, which may come minutes later: a fragment's memory is as much as the machine has."""
    clock = VirtualClock()
    downloads = downloads_on(MemoryBus("r", clock, MemoryStore()), clock)
    held = weakref.ref(downloads._fragment)
    gc.disable()
    try:
        downloads.start([offer_of(1), offer_of(2)])
        await asyncio.sleep(1.0)
        downloads.forget(["1-0"])
        await downloads.close()
        await asyncio.sleep(1.0)
        del downloads
        assert held() is None
    finally:
        gc.enable()
