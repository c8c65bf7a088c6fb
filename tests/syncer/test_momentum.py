"""The momentum of the outer optimizer goes wherever a fragment's values go, bit for bit. Virtual time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.transfer.globals import pull_state
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.checkpoints.places import place_of
from diloco.syncer.checkpoints.restoring import restore_checkpoint
from diloco.syncer.replay.replay import replay
from diloco.syncer.times import TIMES
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time, inline
from tests.saving import save_checkpoint
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec

NONCE = "ab" * 8


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@in_virtual_time
async def test_a_momentum_is_taken_over_mended_saved_restored_and_replayed(tmp_path: Path, codec: Any) -> None:
    commits: list[Committed] = []
    sync = sync_spec(tokens=10**9, outer_momentum=0.5, global_codec=codec)
    world = VirtualRun(sync, record_deltas=tmp_path / "recording")
    service = world.start_syncer()
    learner = VirtualLearner("l0", world).start()
    await world.until_version(5)
    await world.stop_syncer()
    was = [owner.loaded.fragment.momentum for owner in service.owners]
    assert all(momentum.any() for momentum in was)
    service = world.start_syncer()
    async with asyncio.timeout(10):
        while len(service.owners) < 2 or not all(owner.loaded for owner in service.owners):
            await asyncio.sleep(0.001)
    assert all(
        owner.loaded.fragment.momentum.tobytes() == momentum.tobytes()
        for owner, momentum in zip(service.owners, was, strict=True)
    )
    await world.until_version(8)
    await learner.kill()
    await asyncio.sleep(2)
    for head in await world.heads():
        world.store.delete(head.momentum)
    await asyncio.sleep(2 * TIMES.repair_s)
    folder = await save_checkpoint(world.bus, world.spec, place_of(tmp_path / "saved"), inline)
    checkpoint, again = load_checkpoint(str(folder)), MemoryBus("again", VirtualClock())
    for p in range(sync.fragments):
        assert await again.acquire_lease(p, NONCE, 1e9)
    await restore_checkpoint(again, checkpoint, world.spec, NONCE, "s", VirtualClock(), inline)
    for fragment, owner in zip(layout_of(world.spec.tensors).fragments, service.owners, strict=True):
        due, p = owner.loaded.fragment.momentum.tobytes(), fragment.id
        assert checkpoint.fragment(p)[1].tobytes() == due
        for bus in (world.bus, again):
            (head,) = await bus.read_heads([p])
            found = await pull_state(bus, head, fragment.elements, sync, inline)
            assert found[1].tobytes() == due
    commits.extend(record for record in await world.tape() if isinstance(record, Committed))
    await world.stop_syncer()
    outcome = replay(tmp_path / "recording", commits, lambda _: None)
    assert outcome.differences == []
    assert outcome.repeated > 10
