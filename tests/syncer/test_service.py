"""The production syncer and exchange, whole runs in virtual time on the memory bus."""

import asyncio
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args
from unittest.mock import AsyncMock

import pytest
from structlog.testing import capture_logs

from diloco.pipeline.bus.commits import Commit
from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed, Head
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.wire import GlobalCodec
from diloco.pipeline.needs import needs_of, pace_of
from diloco.pipeline.site import Site
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.installing import AT_ONCE
from diloco.syncer.serving.start import check_memory
from diloco.syncer.serving.supervisor import _Presence
from diloco.syncer.times import TIMES
from diloco_studies.virtual.memory import MemoryBus, MemoryStore
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec, under_way


@in_virtual_time
async def test_the_log_tells_who_is_there_falls_silent_and_leaves() -> None:
    """Whoever reads the syncer's log finds a killed learner in it, apart from one that has left."""
    with capture_logs() as lines:
        world, learners = await under_way(3, sync_interval=16, tokens=12_000)
        await learners[1].kill()
        await world.finish(learners[0])
    told = ("learner_came", "learner_fell_silent", "learner_left")
    of_syncer = [line for line in lines if (line["event"] in told and "step" in line) or line["event"] == told[0]]
    found = [(line["event"], line["learner"]) for line in of_syncer]
    assert sorted(found[:2]) == [("learner_came", "l0"), ("learner_came", "l1")]
    assert found[2] == ("learner_fell_silent", "l1")
    assert found[3:] == [("learner_left", "l0")]


def test_a_learner_that_is_back_in_another_life_has_not_fallen_silent() -> None:
    """Killed and started again at once: nobody reads that it is gone while it trains."""
    presence = _Presence()
    before, after = samples.seen("anna", incarnation="a" * 16), samples.seen("anna", incarnation="b" * 16)
    with capture_logs() as lines:
        presence.log_changes([before], [before], 5.0)
        presence.log_changes([before, after], [before, after], 5.0)
        presence.log_changes([after], [before, after], 5.0)
    assert [line["event"] for line in lines] == ["learner_came", "learner_came", "learner_replaced"]


def test_a_syncer_that_has_just_started_names_no_learner_that_is_long_dead() -> None:
    """It counts as live until the syncer has waited for a report; one that reports has come."""
    presence, dead, here = _Presence(), samples.seen("dead", age_s=460.0), samples.seen("here")
    with capture_logs() as lines:
        presence.log_changes([dead, here], [dead, here], 5.0)
        presence.log_changes([samples.seen("here", age_s=6.0)], [dead, here], 5.0)
        presence.log_changes([], [dead, here], 5.0)
    told = [(line["event"], line["learner"]) for line in lines]
    assert told == [("learner_came", "here"), ("learner_fell_silent", "here")]


@pytest.mark.parametrize("global_codec", get_args(GlobalCodec))
@pytest.mark.parametrize(("codec", "quorum", "learners"), [("bf16", 1, 4), ("int8", 4, 4), ("fp32", 6, 6)])
@in_virtual_time
async def test_a_redis_is_refused_that_has_less_than_the_plan_says(
    codec: str, quorum: int, learners: int, global_codec: str
) -> None:
    """Of a run of four learners, or of a quorum, before its first step; to the byte."""
    layout = layout_of((samples.tensor("wide", (10**6,)),))
    site = Site(params=float(layout.elements))
    pace = pace_of(site, learners, 2, codec, global_codec, "nesterov")
    planned = math.ceil(needs_of(site, pace, learners, 2, "nesterov").redis_memory_bytes)
    sync = samples.sync_spec(codec=codec, global_codec=global_codec, quorum=quorum)
    await check_memory(MemoryBus("run", VirtualClock(), MemoryStore(maxmemory_bytes=planned)), layout, sync)
    with pytest.raises(UsageError, match=rf"{learners} deltas, .*2 offers of moments"):
        await check_memory(MemoryBus("run", VirtualClock(), MemoryStore(maxmemory_bytes=planned - 1)), layout, sync)


@in_virtual_time
async def test_a_syncer_that_waits_for_a_spec_says_at_once_what_is_wrong_with_its_redis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not hours later, when somebody begins to train; and once."""
    world = VirtualRun()
    info = dataclasses.replace(await world.bus.info(), warnings=("keys may be evicted",))
    monkeypatch.setattr(MemoryBus, "info", AsyncMock(return_value=info))
    with capture_logs() as lines:
        world.start_syncer()
        await asyncio.sleep(1)
        await world.stop_syncer()
    told = [line for line in lines if line["event"] in ("bus_warning", "waiting_for_spec")]
    assert [line.get("detail") for line in told] == ["keys may be evicted", None]


@in_virtual_time
async def test_the_bus_holds_few_fragments_of_version_0_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fragment's upload goes as its copy is committed; the next ones are copied then."""
    copied: set[int] = set()
    most = []

    async def write_chunks(self: MemoryBus, key: str, *args: Any) -> None:
        if found := re.search(r"global:(\d+):0:", key):
            copied.add(int(found[1]))
            most.append(len(copied))
            await asyncio.sleep(0.01)
        await written(self, key, *args)

    async def commit(self: MemoryBus, commit: Commit) -> None:
        await committed(self, commit)
        copied.discard(commit.record.fragment)

    written, committed = MemoryBus.write_chunks, MemoryBus.commit
    monkeypatch.setattr(MemoryBus, "write_chunks", write_chunks)
    monkeypatch.setattr(MemoryBus, "commit", commit)
    _, (learner,) = await under_way(1, learners=1, fragments=8)
    assert len(most) >= 8
    assert max(most) == AT_ONCE
    await learner.kill()


@in_virtual_time
async def test_a_killed_learner_stops_nobody() -> None:
    """With quorum 1 the others go on merging, and nobody's step ever takes longer."""
    world, learners = await under_way(3, learners=3, tokens=12_000)
    await learners[0].kill()
    before = await world.versions()
    await asyncio.sleep(2.0)
    assert all(after >= was + 2 for after, was in zip(await world.versions(), before, strict=True))
    await world.finish(*learners[1:])
    assert max(learner.longest_step_s for learner in learners[1:]) < 0.11


@in_virtual_time
async def test_a_learner_added_mid_run_joins_and_contributes() -> None:
    """It adopts the heads and is in a merge within two intervals."""
    world = VirtualRun(sync_spec(tokens=12_000))
    world.start_syncer()
    first = VirtualLearner("first", world, 0.1, "a" * 16).start()
    await world.until_version(3)
    late = VirtualLearner("late", world, 0.1, "b" * 16).start()
    await asyncio.sleep(2.0)
    commits = [r for r in await world.tape() if isinstance(r, Committed)]
    assert any(c.learner == "late" for r in commits for c in r.contributions)
    await world.finish(first, late)


@in_virtual_time
async def test_a_quorum_that_cannot_be_met_is_never_lowered_but_said() -> None:
    """K = 2 with one live learner: no merge, a warning in the status; the second learner mends it."""
    world = VirtualRun(sync_spec(quorum=2, tokens=4_000))
    service = world.start_syncer()
    first = VirtualLearner("first", world, 0.1, "a" * 16).start()
    await asyncio.sleep(5.0)
    assert await world.versions() == [0, 0]
    told = "nothing is merged: the quorum is 2, and the run has 1 live learner; start 1 more"
    assert told in (await service.status())["warnings"]
    second = VirtualLearner("second", world, 0.1, "b" * 16).start()
    await asyncio.sleep(3.0)
    assert min(await world.versions()) >= 1
    await world.finish(first, second)


@in_virtual_time
async def test_windows_after_a_long_time_without_a_quorum_wait_for_who_is_a_bit_slower() -> None:
    """Two of three learners are away for two minutes: once they are back, all three are in every merge, as before."""
    world = VirtualRun(sync_spec(quorum=2, fragments=1, tokens=10**9))
    world.start_syncer()
    steps_s = (0.1, 0.1, 0.13)
    learners = [VirtualLearner(f"l{i}", world, s, f"{i:016x}").start() for i, s in enumerate(steps_s)]
    await world.until_version(6)
    await end(*learners[1:])
    await asyncio.sleep(120.0)
    (was,) = await world.versions()
    learners[1:] = [VirtualLearner(f"l{i}", world, steps_s[i], f"{i + 2:016x}").start() for i in (1, 2)]
    await world.until_version(was + 8)
    commits = [r for r in await world.tape() if isinstance(r, Committed)]
    assert commits[was + 1].quorum_s > 100.0
    assert [len(commits[version].contributions) for version in (was, *range(was + 2, was + 8))] == [3] * 7
    await end(*learners)


@in_virtual_time
async def test_a_syncer_that_is_stopped_in_the_runs_first_moments_saves_it(tmp_path: Path) -> None:
    """Before its first look said how far the run is: nothing that was merged by then is missing from the checkpoint."""
    world = VirtualRun()
    world.start_syncer(checkpoint_dir=tmp_path)
    learner = VirtualLearner("l0", world, 0.001, "a" * 16).start()
    async with asyncio.timeout(4 * TIMES.watch_s):
        while min(await world.versions(), default=0) < 1:
            await asyncio.sleep(0.001)
    await world.stop_syncer()
    await learner.kill()
    saved = load_checkpoint(tmp_path)
    assert [one.version for one in saved.fragments] == await world.versions()
    assert saved.state.tokens > 0


@in_virtual_time
async def test_the_metrics_count_open_windows() -> None:
    """With one of two needed learners, its windows stay open; the gauge says how many."""
    world = VirtualRun(sync_spec(quorum=2))
    service = world.start_syncer()
    assert service.metrics.registry.get_sample_value("diloco_open_windows") == 0
    learner = VirtualLearner("l0", world, 0.1, "a" * 16).start()
    await asyncio.sleep(5.0)
    assert service.metrics.registry.get_sample_value("diloco_open_windows") == 2
    await learner.kill()
    await world.stop_syncer()


@in_virtual_time
async def test_a_slow_end_is_still_an_end() -> None:
    """A bus that takes seconds for the last reads delays the end of a finished run, and no more."""
    world = VirtualRun()
    service = world.start_syncer()
    read_heads = service.bus.read_heads

    async def slowly(fragments: Sequence[int]) -> list[Head | None]:
        if service.serving and service.serving.closing.done():
            await asyncio.sleep(5.0)
        return await read_heads(fragments)

    service.bus.read_heads = slowly  # type: ignore[method-assign]
    learner = VirtualLearner("l0", world, 0.1, "a" * 16).start()
    await world.finish(learner)
    state = await world.bus.read_state()
    assert state.phase is Phase.FINISHED


@in_virtual_time
async def test_a_shutdown_that_overruns_its_budget_says_so_and_ends(tmp_path: Path) -> None:
    """What is committed is safe; the process does not hang, and its exit status shows it."""
    world = VirtualRun(shutdown_s=3.0, checkpoint_dir=tmp_path)
    service = world.start_syncer()
    learner = VirtualLearner("l0", world, 0.1, "a" * 16).start()
    await world.until_version(2)
    read_heads = service.bus.read_heads

    async def never(fragments: Sequence[int]) -> list[Head | None]:
        await asyncio.sleep(3600.0)
        return await read_heads(fragments)

    service.bus.read_heads = never  # type: ignore[method-assign]
    world.stop.set()
    async with asyncio.timeout(5.0):
        await world.syncer
    assert not service.in_order
    await learner.kill()


@pytest.mark.parametrize("away_s", [12.0, 3600.0])
@in_virtual_time
async def test_a_shutdown_waits_for_a_failover_and_says_what_it_could_not_write(tmp_path: Path, away_s: float) -> None:
    """A silence of the bus that is shorter than `shutdown_s` loses nothing."""
    world = VirtualRun(shutdown_s=20.0, checkpoint_dir=tmp_path, tape_dir=tmp_path / "tape")
    service = world.start_syncer()
    learner = VirtualLearner("l0", world, 0.1, "a" * 16).start()
    await world.until_version(2)
    back_s, turn = world.clock.now() + away_s, service.bus._turn  # type: ignore[attr-defined]

    async def paused() -> None:
        await asyncio.sleep(max(0.0, back_s - world.clock.now()))
        await turn()

    service.bus._turn = paused  # type: ignore[attr-defined]
    world.stop.set()
    with capture_logs() as logs:
        async with asyncio.timeout(40.0):
            await world.syncer
    told = [line["not_written"] for line in logs if line["event"] == "shutdown_overrun"]
    assert told == ([] if away_s == 12.0 else ["the last checkpoint, the end of the tape's archive"])
    assert service.in_order == (not told)
    await learner.kill()


@in_virtual_time
async def test_a_syncer_started_on_a_finished_run_saves_it_and_ends_at_once(tmp_path: Path) -> None:
    """As when it was killed between the manifest and the last checkpoint; the manifest stays as it is."""
    world = VirtualRun(sync_spec(tokens=1000))
    world.start_syncer()
    await world.finish(VirtualLearner("l0", world).start())
    finished = await world.bus.read_state()
    assert finished.phase is Phase.FINISHED
    world.start_syncer(checkpoint_dir=tmp_path)
    await world.finish()
    assert await world.bus.read_state() == finished
    assert load_checkpoint(tmp_path).state.phase is Phase.FINISHED


@pytest.mark.parametrize("merge_s", [0.2, 5.0])
@in_virtual_time
async def test_the_head_says_that_a_long_merge_is_in_progress(monkeypatch: pytest.MonkeyPatch, merge_s: float) -> None:
    """Otherwise it would seem to wait for uploads. Of a short merge nothing is written: that would lengthen it."""
    merging = False

    async def slowly(work: Callable[..., Any], *args: Any) -> Any:
        nonlocal merging
        merging = getattr(work, "__name__", "") == "merge"
        await asyncio.sleep(merge_s if merging else 0)
        merging = False
        return work(*args)

    monkeypatch.setattr("tests.virtual_run.inline", slowly)
    world = VirtualRun(sync_spec(tokens=10**9, fragments=1))
    world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    await world.until_version(3)
    shown = set()
    for _ in range(1000):
        await asyncio.sleep(0.02)
        (head,) = await world.heads()
        if merging:
            shown.add(head.window.state)
    assert ("merging" in shown) is (merge_s > 1)
    assert head.version > 3
    await end(*learners)
    await world.kill_syncer()
