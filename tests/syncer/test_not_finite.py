"""What a merge yields is committed only if it is finite: a run neither goes on with a NaN nor spins. Virtual time."""

import asyncio
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.fragment import RefusalReason, Rejected
from diloco.pipeline.transfer.globals import pull_state
from diloco.syncer.merging.fragment import FragmentState
from diloco.syncer.merging.merge import all_finite
from diloco.syncer.merging.outer import OuterStep, Stepped
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time, inline
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec


class Overflowing(FragmentState):
    """Its fragment 0 overflows in the first so many merges, in one of its arrays."""

    times = 0
    left = 0
    what = "theta"

    def outer_step(self, *given: Any) -> OuterStep:
        step = super().outer_step(*given)
        take = step.take

        def overflowing() -> Stepped:
            stepped = take()
            array = stepped.theta if self.what == "theta" else stepped.momentum
            if self.layout.id == 0 and Overflowing.left and array is not None:  # the first merges only average
                Overflowing.left -= 1
                Overflowing.times += 1
                array[1] = np.inf
            return stepped

        step.take = overflowing  # type: ignore[method-assign]
        return step


@pytest.fixture(autouse=True)
def overflowing(monkeypatch):
    monkeypatch.setattr("diloco.syncer.owner.FragmentState", Overflowing)


async def start(left: int, what: str = "theta", **sync) -> tuple[VirtualRun, list[VirtualLearner]]:
    Overflowing.left, Overflowing.times, Overflowing.what = left, 0, what
    world = VirtualRun(sync_spec(tokens=10**9, quorum=2, outer_momentum=0.5, **sync))
    world.start_syncer()
    return world, [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]


@pytest.mark.parametrize("what", ["theta", "momentum"])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@in_virtual_time
async def test_a_merge_that_is_not_finite_is_refused_with_the_reason_and_the_fragment_goes_on(
    what: str, codec: str
) -> None:
    """The version is kept, learners are asked for other deltas, and no array on the bus is not finite."""
    world, learners = await start(3, what, global_codec=codec)
    await world.until_version(4)
    assert Overflowing.times == 3
    refused = [r for r in await world.tape() if isinstance(r, Rejected) and r.reason is RefusalReason.MERGE_NOT_FINITE]
    assert len(refused) == 6
    assert "version" in refused[0].detail
    for head in await world.heads():
        elements = len(learners[0].values[head.fragment])
        theta, momentum = await pull_state(world.bus, head, elements, world.spec.sync, inline)
        assert np.isfinite(theta).all()
        assert np.isfinite(momentum).all()
    for learner in learners:
        assert np.isfinite(np.concatenate(learner.values)).all()
        await learner.kill()


@in_virtual_time
async def test_the_window_is_open_again_before_what_was_in_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that loses the bus in between leaves a window for which learners are asked again."""
    calls: list[tuple[str, Any]] = []

    def note(name: str, place: int) -> None:
        call = getattr(MemoryBus, name)

        async def noted(self: Any, p: int, *args: Any) -> None:
            if p == 0:
                calls.append((name, args[place]))
            await call(self, p, *args)

        monkeypatch.setattr(MemoryBus, name, noted)

    note("write_window", 2)
    note("refuse", 0)
    world, learners = await start(1)
    await world.until_version(4)
    assert Overflowing.times == 1
    refused = [name for name, _ in calls].index("refuse")
    assert calls[refused][1].records[0].reason is RefusalReason.MERGE_NOT_FINITE
    name, window = calls[refused - 1]
    assert (name, window.attempt, window.state) == ("write_window", 1, "collecting")
    await end(*learners)


@in_virtual_time
async def test_a_fragment_that_never_merges_finitely_does_not_spin_and_holds_up_no_other() -> None:
    """It is tried less and less often."""
    world, learners = await start(10**6)
    await world.until_version(0)
    await asyncio.sleep(100.0)
    versions = await world.versions()
    assert versions[0] == 0
    assert versions[1] > 50
    assert 4 <= Overflowing.times <= 10
    await end(*learners)


@in_virtual_time
async def test_a_syncer_that_is_told_to_stop_between_such_merges_stops_at_once() -> None:
    """The pause after them, of up to half a minute, is nothing that is waited for."""
    world, learners = await start(10**6)
    await asyncio.sleep(40.0)
    began = asyncio.get_running_loop().time()
    await world.stop_syncer()
    assert asyncio.get_running_loop().time() - began < 5.0
    await end(*learners)


@in_virtual_time
async def test_values_on_the_bus_that_are_not_finite_are_not_merged_into() -> None:
    """Whoever wrote them: the owner says so, and waits."""
    world, learners = await start(0)
    await world.until_version(2)
    await world.kill_syncer()
    await end(*learners)
    (head,) = await world.bus.read_heads([0])
    elements = len(learners[0].values[0])
    for key in list(world.store.values):
        if ":lease:" in key:
            world.store.delete(key)
    assert await world.bus.acquire_lease(0, "ab" * 8, 1.0)
    nan = np.full(elements, np.nan, np.float32)
    await samples.commit(world.bus, 0, head.version + 1, nan, expected=(head.version, head.digest))
    await world.bus.release_lease(0, "ab" * 8)
    service = world.start_syncer()
    await asyncio.sleep(10.0)
    with pytest.raises(BadPayload, match=r"not finite: resume from an earlier checkpoint"):
        await service.owners[0].load()


def test_all_finite_sees_a_single_element() -> None:
    """Wherever it stands, of whichever kind; the largest numbers are finite."""
    values = np.full(5000, np.finfo(np.float32).max, np.float32)
    assert all_finite(values)
    assert all_finite(np.empty(0, np.float32))
    for at in (0, 2500, 4999):
        for what in (np.nan, np.inf, -np.inf):
            spoiled = values.copy()
            spoiled[at] = what
            assert not all_finite(spoiled)
