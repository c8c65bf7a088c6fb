"""Stop, checkpoint, resume: the syncer service goes on where the run was, whatever comes between. Virtual time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.commits import Commit
from diloco.pipeline.errors import BusUnavailable, UsageError
from diloco.pipeline.payload.codec import encode
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.syncer.test_several_syncers import until
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

BUDGET = 12_000


async def stopped_run(folder: Path) -> None:
    """Train a while, stop the syncer: it leaves a checkpoint."""
    world = VirtualRun(sync_spec(tokens=BUDGET, outer_momentum=0.5), checkpoint_dir=folder)
    world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, incarnation=f"{i:016x}").start() for i in range(2)]
    await world.until_version(5)
    await world.stop_syncer()
    await end(*learners)


@in_virtual_time
async def test_unless_told_otherwise_a_run_is_saved_every_five_minutes(tmp_path) -> None:
    """What a machine that dies takes with it is minutes; of older checkpoints the last three stay."""
    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_dir=tmp_path)
    world.start_syncer()
    learner = VirtualLearner("l0", world, step_s=3.0).start()
    await asyncio.sleep(1530.0)
    await learner.kill()  # and the syncer with the loop: nobody is told to stop
    saved = [load_checkpoint(folder).state.tokens for folder in tmp_path.glob("*/checkpoint-*")]
    minutes = sorted(tokens / 10 * 3.0 / 60 for tokens in saved)
    assert minutes == pytest.approx([15, 20, 25], abs=0.5)


def new_world() -> VirtualRun:
    return VirtualRun(sync_spec(tokens=BUDGET, outer_momentum=0.5))


async def go_on(world: VirtualRun, folder: Path, learner: VirtualLearner | None = None) -> None:
    """Resume, train to the end, and check that training continued and was not begun anew."""
    saved = load_checkpoint(folder)
    if world.syncer is None:
        world.start_syncer(resume=folder)
    learner = learner or VirtualLearner("again", world, incarnation="f" * 16).start()
    await world.finish(learner)
    state = await world.bus.read_state()
    assert state.base_tokens == saved.state.tokens
    assert state.tokens >= BUDGET
    assert learner.rounds.tokens < BUDGET - saved.state.tokens + 1000, "trained as if from the start"
    tape = await world.tape()
    for p, fragment in enumerate(saved.fragments):
        versions = [r.version for r in tape if r.kind == "committed" and r.fragment == p]
        assert versions == list(range(fragment.version, versions[-1] + 1))
        assert versions[-1] > fragment.version


@in_virtual_time
async def test_a_run_that_is_resumed_again_and_again_knows_when_it_began(tmp_path) -> None:
    """By that learners tell their own saved moments from another run's, whatever the name of the run."""
    await stopped_run(tmp_path)
    origin = load_checkpoint(tmp_path).state.started_unix_s
    for _ in range(2):
        world = new_world()
        world.start_syncer(resume=tmp_path, checkpoint_dir=tmp_path)
        learner = VirtualLearner("again", world, incarnation="f" * 16).start()
        await world.until_version(max(one.version for one in load_checkpoint(tmp_path).fragments) + 1)
        await world.stop_syncer()
        await learner.kill()
        assert load_checkpoint(tmp_path).state.origin_unix_s == origin


@in_virtual_time
async def test_learners_that_came_first_do_not_start_the_run_anew(tmp_path) -> None:
    """A learner proposes the spec and uploads its own parameters before the syncer is up: the checkpoint wins."""
    await stopped_run(tmp_path)
    world, saved = new_world(), load_checkpoint(tmp_path)
    await world.bus.propose_spec(encode(saved.spec))
    learner = VirtualLearner("early", world, incarnation="f" * 16).start()
    await asyncio.sleep(2.0)
    await go_on(world, tmp_path, learner)


@in_virtual_time
async def test_an_outage_in_the_middle_of_a_restore_is_no_new_start(tmp_path) -> None:
    """Redis goes away after the first fragment: the rest is restored when it is back."""
    await stopped_run(tmp_path)
    world = new_world()
    service = world.start_syncer(resume=tmp_path)
    commit, calls = service.bus.commit, []

    async def failing(what: Commit) -> None:
        calls.append(what)
        if len(calls) == 2:
            raise BusUnavailable("gone")
        await commit(what)

    service.bus.commit = failing
    await go_on(world, tmp_path)
    assert len(calls) > 2


@pytest.mark.parametrize("call", ["write_chunks", "commit"])
@in_virtual_time
async def test_a_syncer_that_is_overtaken_while_it_resumes_follows(tmp_path, call: str) -> None:
    """Two resume at once; the first is cut off half-way for longer than its leases, and the other one takes over."""
    await stopped_run(tmp_path)
    world = new_world()
    first = world.start_syncer(resume=tmp_path, syncer_id="first")
    overtaken, calls, slow, acquire = world.syncer, 0, getattr(first.bus, call), first.bus.acquire_lease
    restored = asyncio.Event()

    async def cut_off(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            await restored.wait()
        return await slow(*args)

    async def not_prolonged(*args: Any) -> bool:
        if calls >= 2 and not restored.is_set():
            raise BusUnavailable("cut off")
        return await acquire(*args)

    setattr(first.bus, call, cut_off)
    first.bus.acquire_lease = not_prolonged
    await until(lambda: calls >= 2, 60)
    second = world.start_syncer(resume=tmp_path, syncer_id="second")
    going_on = asyncio.create_task(go_on(world, tmp_path))
    async with asyncio.timeout(60):
        while len(await world.heads()) < 2 or second.serving is None:
            await asyncio.sleep(0.1)
    assert calls == 2
    restored.set()
    await going_on
    async with asyncio.timeout(60):
        await overtaken


@in_virtual_time
async def test_a_restarted_syncer_with_the_same_flags_goes_on(tmp_path) -> None:
    """Compose restarts it with --resume; by then the run is past its checkpoint, and stays there."""
    await stopped_run(tmp_path)
    world, saved = new_world(), load_checkpoint(tmp_path)
    world.start_syncer(resume=tmp_path)
    learner = VirtualLearner("l", world, incarnation="f" * 16).start()
    await world.until_version(saved.fragments[0].version + 2)
    await world.stop_syncer()
    world.start_syncer(resume=tmp_path)
    await go_on(world, tmp_path, learner)


@in_virtual_time
async def test_a_run_that_began_without_the_checkpoint_is_not_overwritten(tmp_path) -> None:
    """Asking for it is a mistake, said in words."""
    await stopped_run(tmp_path)
    world = new_world()
    world.start_syncer()
    learner = VirtualLearner("l", world, incarnation="f" * 16).start()
    await world.until_version(1)
    await world.stop_syncer()
    world.start_syncer(resume=tmp_path)
    with pytest.raises(UsageError, match="--run"):
        await world.syncer
    await learner.kill()


@in_virtual_time
async def test_a_budget_that_is_used_up_is_said_before_a_run_begins_with_a_checkpoint(tmp_path) -> None:
    await stopped_run(tmp_path)
    world = new_world()
    world.start_syncer(resume=tmp_path, tokens=10)
    with pytest.raises(UsageError, match="larger budget"):
        await world.syncer
