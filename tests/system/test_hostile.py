"""Learners that send what cannot be used, or too much of it, among others that do not: in virtual time."""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from structlog.testing import capture_logs

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed, RefusalReason, Rejected, WindowChanged, WindowView
from diloco.pipeline.messages.payload import Chunk
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import MAX_LEARNERS
from diloco.pipeline.payload.codec import decode, encode
from diloco.pipeline.payload.quantize import BLOCK
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.admission import SUSPECTED_AFTER, Suspects
from diloco.syncer.downloads import MAX_ARRIVED
from diloco.syncer.refusals import TOLD_A_WINDOW
from diloco.workers.exchange import refused
from diloco.workers.rounds import RENEWED_BY
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time, run_virtual
from tests import samples, slow_beyond
from tests.samples import encode_chunks
from tests.syncer.test_several_syncers import until
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec, under_way

BAD = "l7"
Spoil = Callable[[VirtualLearner], None]


@pytest.fixture(autouse=True)
def nobody_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor ends because of what is refused of it, as learners of ours do."""
    monkeypatch.setattr(refused, "HEALED_AFTER", math.inf)


def poisoned(value: float) -> Spoil:
    def spoil(learner: VirtualLearner) -> None:
        def train() -> None:
            for values in learner.values:
                values.fill(value)
            learner.rounds.trained(10)

        learner.train = train  # type: ignore[method-assign]

    return spoil


def damaged(learner: VirtualLearner) -> None:
    """Its chunks do not have the digests that they say."""
    write = learner.bus.write_chunks

    async def spoiled(key: str, first: int, chunks: list[bytes], ttl_s: float) -> None:
        await write(key, first, [chunk[:-20] + bytes(20) for chunk in chunks], ttl_s)

    learner.bus.write_chunks = spoiled  # type: ignore[method-assign]


def damaged_at_first(learner: VirtualLearner) -> None:
    """As `damaged`; and a delta is refused before the rest of it is there."""
    damaged(learner)
    write = learner.bus.write_chunks

    async def slowly(key: str, first: int, chunks: list[bytes], ttl_s: float) -> None:
        await asyncio.sleep(0.5 * (first > 0))
        await write(key, first, chunks, ttl_s)

    learner.bus.write_chunks = slowly  # type: ignore[method-assign]


def silent(learner: VirtualLearner) -> None:
    """It announces, and uploads nothing."""

    async def nothing(*_: Any) -> None:
        return None

    learner.bus.write_chunks = nothing  # type: ignore[method-assign]


def trickling(gap_s: float, chunks: int) -> Spoil:
    """Its chunks come one by one, so many of them at most."""

    def spoil(learner: VirtualLearner) -> None:
        write = learner.bus.write_chunks

        async def slowly(key: str, first: int, given: list[bytes], ttl_s: float) -> None:
            for index, chunk in enumerate(given[: max(0, chunks - first)], first):
                await asyncio.sleep(gap_s)
                await write(key, index, [chunk], ttl_s)

        learner.bus.write_chunks = slowly  # type: ignore[method-assign]

    return spoil


async def merges_of(world: VirtualRun, spoil: Spoil | None, seconds: float) -> list[Committed]:
    """What eight learners, the last of them spoilt, have merged while the time went by."""
    service = world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.1 + 0.003 * i, f"{i:016x}").start() for i in range(8)]
    await world.until_version(2)
    if spoil is not None:
        spoil(learners[7])
        await asyncio.sleep(8.0)  # until it is suspected
        assert service.owners[0].suspected == {BAD}
        assert (await world.heads())[0].window.suspected == (BAD,)
    before = len(await world.tape())
    await asyncio.sleep(seconds)
    merged = [record for record in (await world.tape())[before:] if isinstance(record, Committed)]
    await end(*learners)
    return merged


def forged(scale: float) -> Spoil:
    """Sound chunks of sound digests, in which every scale is this."""

    def spoil(learner: VirtualLearner) -> None:
        write = learner.bus.write_chunks

        async def forging(key: str, first: int, chunks: list[bytes], ttl_s: float) -> None:
            data = np.frombuffer(b"".join(decode(Chunk, chunk).data for chunk in chunks), np.uint8).copy()  # one group
            blocks = len(data) // (2 + BLOCK // 2)
            data[: 2 * blocks].view(ml_dtypes.bfloat16)[:] = scale
            await write(key, first, list(encode_chunks(data, learner.world.spec.sync.chunk_bytes)), ttl_s)

        learner.bus.write_chunks = forging  # type: ignore[method-assign]

    return spoil


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (np.nan, RefusalReason.NON_FINITE),
        (np.inf, RefusalReason.NON_FINITE),
        (2.0**127, RefusalReason.NON_FINITE),
        (1e6, RefusalReason.ABSURD_NORM),
        (-1.0, RefusalReason.BAD_PAYLOAD),
    ],
)
@in_virtual_time
async def test_a_scale_that_is_none_is_refused_with_its_reason(scale: float, reason: RefusalReason) -> None:
    """Not finite, decoding to what is not, absurd, or negative: nothing of it is merged, and the others go on."""
    world, learners = await under_way(2, learners=3, quorum=2, fragments=1, codec="int4")
    forged(scale)(learners[2])
    was = (await world.versions())[0]
    await world.until_version(was + 6)
    tape = await world.tape()
    refused = Counter(r.reason for r in tape if isinstance(r, Rejected) and r.learner == "l2")
    assert refused[reason] >= SUSPECTED_AFTER
    late = [r for r in tape if isinstance(r, Committed) and r.version > was + 2]
    assert late
    assert not any(part.learner == "l2" for r in late for part in r.contributions)
    await end(*learners)


SIX = sync_spec(tokens=10**9, quorum=6, fragments=1)


@cache
def honest_merges() -> list[Committed]:
    """With a quorum of six."""
    return run_virtual(merges_of(of_chunks(SIX), None, 12.0))


def of_chunks(spec: SyncSpec) -> VirtualRun:
    """Of which each delta has eight."""
    world = VirtualRun(spec)
    elements = 2 * spec.chunk_bytes
    tensors = tuple(one.model_copy(update={"shape": (elements,)}) for one in world.spec.tensors)
    world.spec = world.spec.model_copy(update={"tensors": tensors})
    return world


SPOILT = {
    "nan": (poisoned(np.nan), RefusalReason.NON_FINITE),
    "silent": (silent, RefusalReason.UPLOAD_TIMEOUT),
    "never the last chunk": (trickling(0.3, 7), RefusalReason.TOO_STALE),
    "absurd": (poisoned(1e6), RefusalReason.ABSURD_NORM),
    "damaged": (damaged, RefusalReason.BAD_PAYLOAD),
    "a thin line": (trickling(0.2, 8), RefusalReason.TOO_STALE),
}


@pytest.mark.parametrize(("spoil", "reason"), slow_beyond(3, SPOILT.values()), ids=SPOILT)
def test_one_bad_learner_among_eight_holds_up_nobody(spoil: Spoil, reason: RefusalReason) -> None:
    """As many merges as without it, in windows that are no longer open, without anything of it, whatever it sends."""
    honest = honest_merges()

    async def bad() -> None:
        world = of_chunks(SIX)
        merged = await merges_of(world, spoil, 12.0)
        assert len(honest) > 10
        assert len(merged) >= 0.9 * len(honest)
        assert not any(part.learner == BAD for record in merged for part in record.contributions)
        for open_s in (lambda r: r.grace_s, lambda r: r.quorum_s + r.grace_s + r.upload_s):
            assert np.mean([open_s(r) for r in merged]) <= np.mean([open_s(r) for r in honest]) + 0.05
        refused = Counter((r.reason, r.learner) for r in await world.tape() if isinstance(r, Rejected))
        assert refused[reason, BAD] >= SUSPECTED_AFTER
        (head,) = await world.heads()
        assert head.refused[reason.value] == sum(times for (why, _), times in refused.items() if why is reason)

    run_virtual(bad())


@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.3])
@in_virtual_time
async def test_a_learner_that_renews_what_it_never_uploads_is_suspected_however_quick_its_steps_are(
    step_s: float,
) -> None:
    """Announcing anew restarts no deadline: it is waited for in vain three times, and no more."""
    world = VirtualRun(sync_spec(tokens=10**9, quorum=2, fragments=1))
    service = world.start_syncer()
    steps = (0.1, 0.1, step_s)
    learners = [VirtualLearner(f"l{i}", world, s, f"{i:016x}").start() for i, s in enumerate(steps)]
    await world.until_version(2)
    silent(learners[2])
    await until(lambda: service.owners[0].suspected == {"l2"}, 20)
    await end(*learners)


@in_virtual_time
async def test_a_suspected_learner_that_sends_a_sound_delta_is_waited_for_again() -> None:
    """Nothing is held against it: its delta is merged, and the next window expects it."""
    world, learners = await under_way(2, learners=3, quorum=2, fragments=1)
    train = learners[2].train
    poisoned(np.nan)(learners[2])
    await until(lambda: world.service.owners[0].suspected == {"l2"}, 30)
    learners[2].train = train  # type: ignore[method-assign]
    learners[2].values[0][:] = 0.5
    await until(lambda: not world.service.owners[0].suspected, 30)
    await asyncio.sleep(3.0)
    last = [record for record in await world.tape() if isinstance(record, Committed)][-1]
    assert {part.learner for part in last.contributions} == {"l0", "l1", "l2"}
    await end(*learners)


async def _suspected_below_the_quorum(spoil: Spoil) -> tuple[VirtualRun, list[VirtualLearner]]:
    """Two learners of a quorum of two, one of which has sent nothing sound for 600 steps."""
    sync = sync_spec(tokens=10**9, quorum=2, fragments=1, codec="fp32").model_copy(update={"chunk_bytes": 16})
    world = VirtualRun(sync)
    world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    await world.until_version(2)
    spoil(learners[1])
    await asyncio.sleep(60.0)
    (head,) = await world.heads()
    assert head.window.suspected == ("l1",)
    assert head.window.state == "collecting", "it waits for a second one"
    return world, learners


@in_virtual_time
async def test_a_suspected_learner_opens_no_window_again_with_each_of_its_steps() -> None:
    """The quorum is short while it sends NaN: neither it nor the tape is asked at every step, and it is heard again."""
    world, learners = await _suspected_below_the_quorum(poisoned(np.nan))
    tape = await world.tape()
    assert max(r.attempt for r in tape if isinstance(r, WindowChanged)) <= SUSPECTED_AFTER
    assert SUSPECTED_AFTER < sum(isinstance(r, Rejected) for r in tape) < 30, "it renews, less and less often"
    await end(*learners)


@in_virtual_time
async def test_no_number_of_attempts_ends_a_window() -> None:
    """A window that was opened a million times is opened once more, and its deltas are merged."""
    world, learners = await under_way(2, quorum=2, fragments=1)
    session = world.service.owners[0].session
    session.window.attempt = 10**6
    damaged(learners[1])
    await until(lambda: session.window.attempt != 10**6, 10)
    del learners[1].bus.write_chunks  # type: ignore[misc]
    await world.until_version(session.window.version + 1)
    merged = [r for r in await world.tape() if isinstance(r, Committed)][-1].contributions
    assert max(part.attempt for part in merged) > 10**6
    await end(*learners)


@pytest.mark.parametrize("restarted", [False, True], ids=["mended in its place", "started again"])
@pytest.mark.parametrize("spoil", [damaged, damaged_at_first])
@in_virtual_time
async def test_a_suspected_learner_that_the_quorum_lacks_is_in_the_window_once_it_is_mended(
    restarted: bool, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same base: within a renewal if it goes on, in some steps if it was started again."""
    monkeypatch.setattr("diloco.pipeline.transfer.payloads.PIECE_BYTES", 16)
    world, learners = await _suspected_below_the_quorum(spoil)
    (was,) = await world.versions()
    if restarted:
        await learners[1].kill()
        learners.append(VirtualLearner("l1", world, 0.1, "f" * 16).start())
    else:
        del learners[1].bus.write_chunks  # type: ignore[misc]
    await world.until_version(was + 1, 3.0 if restarted else 0.1 * 700 / RENEWED_BY)
    await end(*learners)


@pytest.mark.parametrize("whole", [True, False], ids=["left in order", "killed in its upload"])
@in_virtual_time
async def test_a_suspected_learner_that_comes_back_alone_opens_the_window_again(whole: bool) -> None:
    """Though a delta of its life before is still here: a whole one that is not due, or one that never will be whole."""
    world, (before,) = await under_way(2, learners=1, quorum=1, fragments=1, sync_interval=4)
    if whole:
        await asyncio.sleep(0.2)
        before.stop = True
        assert before.task is not None
        await before.task
    else:
        await before.kill()
    await asyncio.sleep(10.0)
    (head,) = await world.heads()
    (owner,) = world.service.owners
    for _ in range(SUSPECTED_AFTER):
        owner.state.suspects.refused("l0", RefusalReason.UPLOAD_TIMEOUT)
    if not whole:
        base = {"base_version": head.version, "base_digest": head.digest, "serial": 77, "chunks": 1}
        sent = {"layout": layout_of(world.spec.tensors).digest, "codec": world.spec.sync.codec}
        await world.bus.offer(samples.header("l0", incarnation="a" * 16, **base, **sent))
    again = VirtualLearner("l0", world, 0.9, "f" * 16).start()
    await world.until_version(head.version + 1, 8.0)  # it renews its delta after twelve steps
    await end(again)


@in_virtual_time
async def test_a_flood_of_headers_is_refused_and_fills_neither_tape_nor_memory() -> None:
    """Thousands in another's name and in many names of its own; the others' merges go on meanwhile."""
    world, learners = await under_way(2, quorum=2, fragments=1)
    (head,) = await world.heads()
    real = next(r for r in await world.tape() if isinstance(r, Committed) and r.contributions).contributions[0]
    records = len(await world.tape())
    for n in range(3 * MAX_ARRIVED):
        forged = samples.header(
            real.learner if n % 2 else "flood",
            incarnation=f"{n:08x}",
            base_version=head.version,
            base_digest=head.digest,
            layout=world.service.serving.context.layout.digest,
            codec=world.spec.sync.codec,
            chunks=1,
            due=False,
        )
        await world.bus.offer(forged)
    was = (await world.versions())[0]
    await world.until_version(was + 5)
    assert len(world.service.owners[0].session.window.pending()) < 20
    assert len(await world.bus.read_offers(0)) < 20
    (head,) = await world.heads()
    assert sum(head.refused.values()) > 3 * MAX_ARRIVED - 20
    told = [r for r in (await world.tape())[records:] if isinstance(r, Rejected)]
    assert len(told) <= 3 * TOLD_A_WINDOW * 6
    assert {r.learner for r in told if r.last_told} == {real.learner, "flood"}
    for learner in learners:
        assert learner.longest_step_s < 0.2
        await learner.kill()


@pytest.mark.parametrize("at_once", [5, 50])
@in_virtual_time
async def test_merges_keep_their_rate_in_a_flood_and_five_seconds_after_it_all_is_as_before(
    at_once: int, monkeypatch: pytest.MonkeyPatch, no_log_lines: None
) -> None:
    """100 or 1,000 headers a second for 25 s, past us, on each stream of a learner that trains: half are like its own.

    A call takes 20 ms, so no step may be taken for each of them. Nobody has to remove anything.
    """
    turn = MemoryBus._turn

    async def far(self: MemoryBus) -> None:
        await asyncio.sleep(0.02)
        await turn(self)

    monkeypatch.setattr(MemoryBus, "_turn", far)
    world, learners = await under_way(4, learners=3, quorum=2, sync_interval=16)
    sent = itertools.count(1)

    async def pour(count: int) -> None:
        for head in await world.heads():
            forged = samples.header(
                "l2",
                incarnation=f"{next(sent):08x}",
                fragment=head.fragment,
                base_version=head.version,
                base_digest=head.digest,
                layout=world.service.serving.context.layout.digest,
                codec=world.spec.sync.codec,
                chunks=1,
            )
            for n in range(count):
                world.bus._xadd(world.bus.keys.deltas(head.fragment, "l2"), b"x" if n % 2 else encode(forged))

    async def flood() -> None:
        while True:
            await pour(at_once)
            await asyncio.sleep(0.05)

    async def merges(seconds: float) -> list[Committed]:
        cursors = await world.bus.tape_end()
        await asyncio.sleep(seconds)
        found = [entry.record for entry in await world.bus.read_tape(cursors, limit=100_000)]
        return [record for record in found if isinstance(record, Committed)]

    def with_it(commits: list[Committed]) -> float:
        return sum(any(part.learner == "l2" for part in c.contributions) for c in commits) / len(commits)

    usual = await merges(40.0)
    flooding = asyncio.create_task(flood())
    in_background = await merges(25.0)
    flooding.cancel()
    await asyncio.sleep(5.0)
    for count in (20, 40, 30):  # by the last ones those before are read, and most of them stay: they are read again
        await pour(count)
        await asyncio.sleep(0.05)
    await asyncio.sleep(5.0)
    after = await merges(40.0)
    assert len(in_background) / 25 > 0.7 * len(usual) / 40
    assert len(after) > 0.95 * len(usual)
    assert min(with_it(usual), with_it(after)) > 0.9
    assert sum(head.refused[RefusalReason.FLOOD] for head in await world.heads()) > 400 * at_once
    assert max([len(await world.bus.read_offers(p)) for p in range(2)]) < 5, "nothing of it is left"
    await end(*learners)


def test_suspicion_begins_with_refusals_in_a_row_and_ends_with_a_sound_delta() -> None:
    """Reasons that a fault explains raise none; and a flood of names is forgotten, oldest first."""
    suspects = Suspects()
    for reason in (RefusalReason.TOO_STALE, RefusalReason.DUPLICATE, RefusalReason.ALREADY_MERGED) * 5:
        suspects.refused("l0", reason)
    assert not suspects.learners
    for _ in range(SUSPECTED_AFTER - 1):
        suspects.refused("l0", RefusalReason.NON_FINITE)
    assert not suspects.learners
    suspects.refused("l0", RefusalReason.ABSURD_NORM)
    assert suspects.learners == {"l0"}
    for learner in ("l0", "never refused"):
        suspects.delta_usable(learner)
    assert not suspects.learners
    for n in range(10_000):
        suspects.refused(f"f{n}", RefusalReason.NON_FINITE)
    assert len(suspects._in_a_row) == MAX_LEARNERS


def test_the_view_of_a_window_names_who_is_suspected_and_is_bounded() -> None:
    """As everything that comes from elsewhere."""
    assert WindowView(**samples.IDLE.model_dump() | {"suspected": ("l0",)}).suspected == ("l0",)
    with pytest.raises(ValueError, match="suspected"):
        WindowView(**samples.IDLE.model_dump() | {"suspected": ("l0",) * 5000})


@in_virtual_time
async def test_a_run_without_a_syncer_keeps_what_is_published_bounded_and_goes_on_when_one_comes() -> None:
    """Learners train on for half an hour, a delta a fragment and base, and say what is missing, as the status does; the
    syncer that comes back merges at once."""
    world = VirtualRun(sync_spec(tokens=10**9, quorum=2, fragments=2))
    world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.5, f"{i:016x}").start() for i in range(2)]
    await world.until_version(2)
    await world.kill_syncer()
    versions, most = await world.versions(), 0
    with capture_logs() as told:
        for _ in range(60):
            await asyncio.sleep(30.0)
            most = max(most, world.store.used_bytes())
            for p in range(2):
                assert len(await world.bus.read_offers(p)) <= 2 * len(learners)
    missing = [line["detail"] for line in told if line["event"] == "no_syncer"]
    assert len(missing) == len(learners)
    assert all("start `diloco syncer`" in one for one in missing)
    status = await read_status(world.bus, world.clock)
    assert any("the run has no syncer" in warning for warning in status["warnings"])
    assert most < 20_000
    assert await world.versions() == versions
    for learner in learners:
        assert len(learner.exchange.publishing._headers) <= 2
        assert learner.exchange.publishing._uploads[0].qsize() <= 2
        assert learner.longest_step_s < 1.0
    world.start_syncer()
    await world.until_version(max(versions) + 2, 120.0)
    await end(*learners)
