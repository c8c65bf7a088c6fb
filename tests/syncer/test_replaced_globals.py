"""Globals that are replaced, and globals that are lost."""

import asyncio

import pytest

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.transfer.globals import pull_state
from diloco.syncer.committing import Staging
from diloco.syncer.times import TIMES
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time, inline
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

LAYOUT = layout_of([samples.tensor("a", (1000,))]).fragments[0]


def staging(fragments: int = 1) -> Staging:
    sync = samples.sync_spec(fragments=fragments)
    return Staging(MemoryBus("r", VirtualClock()), VirtualClock(), LAYOUT, sync, lambda n: "0" * 2 * n)


def head(name: str) -> Head:
    return samples.head(payload=name, momentum="")


@in_virtual_time
async def test_after_a_rewind_what_is_named_again_is_replaced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lost commits had replaced may be what the head names: then it is the last one that is replaced."""
    monkeypatch.setattr("diloco.syncer.committing.REPLACED_BYTES", 0)
    one = staging()
    assert one.retire(head("1")) == ()
    assert one.retire(head("2")) == ("1",)
    # The bus went back, and names "2" again: it is replaced once more, and stays as the last one that is.
    assert one.retire(head("2")) == ()
    assert one.retire(head("3")) == ("2",)


@pytest.mark.parametrize(("fragments", "kept"), [(1, 8), (2, 4), (8, 1), (100, 1)])
@in_virtual_time
async def test_replaced_globals_of_all_fragments_share_a_bound_and_each_keeps_one(
    fragments: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of the one before last could only train what is too stale to be merged."""
    monkeypatch.setattr("diloco.syncer.committing.REPLACED_BYTES", 8 * 4 * LAYOUT.elements)
    one = staging(fragments)
    for version in range(20):
        went = one.retire(head(f"global-{version}"))
        assert went == ((f"global-{version - kept}",) if version >= kept else ())


@pytest.mark.parametrize("lost", ["payload", "rest", "momentum"])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@in_virtual_time
async def test_what_is_lost_is_published_anew_and_the_run_goes_on(codec: str, lost: str) -> None:
    """While no learner has it, and none is merged: its owner has the same bits."""
    world = VirtualRun(sync_spec(global_codec=codec, outer_momentum=0.5, tokens=10**9))
    world.start_syncer()
    learner = VirtualLearner("l0", world).start()
    await world.until_version(3)
    await end(learner)
    await asyncio.sleep(1)
    heads = await world.heads()
    for head in heads:
        world.store.delete(getattr(head, lost))
    late = VirtualLearner("l1", world, incarnation="1" * 16).start()
    await world.until_version(max(head.version for head in heads) + 3, 3 * TIMES.repair_s)
    await asyncio.sleep(2 * TIMES.repair_s)
    await end(late)
    await asyncio.sleep(1)
    for head in await world.heads():
        of = layout_of(world.spec.tensors).fragments[head.fragment]
        theta, momentum = await pull_state(world.bus, head, of.elements, world.spec.sync, inline)
        state = world.service.owners[head.fragment].loaded.fragment
        assert (theta.tobytes(), momentum.tobytes()) == (state.theta.tobytes(), state.momentum.tobytes())
