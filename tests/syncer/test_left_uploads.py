"""What a learner that has left had uploaded: all of it is on the bus, or a failover has lost the end of it."""

import asyncio
from typing import Any

import pytest

from diloco.pipeline.messages.fragment import Committed, Rejected
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

SLOW_S = 8.0
"""Longer than a learner may be silent, which is 5 s."""


@pytest.mark.parametrize("whole", [True, False])
@in_virtual_time
async def test_one_that_has_left_is_merged_however_slowly_its_upload_comes_and_given_up_if_it_is_not_whole(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is not asked again and again whether it is whole: once while its learner might have been silent."""
    read, count, looks = MemoryBus.read_chunks, MemoryBus.count_chunks, list[str]()

    async def read_chunks(self: MemoryBus, key: str, *args: Any, **more: Any) -> Any:
        if ":delta:" in key and ":l1:" in key:
            await asyncio.sleep(SLOW_S)
        return await read(self, key, *args, **more)

    async def count_chunks(self: MemoryBus, key: str) -> int:
        looks.extend([key] * (":delta:" in key and ":l1:" in key))
        return await count(self, key)

    monkeypatch.setattr(MemoryBus, "read_chunks", read_chunks)
    monkeypatch.setattr(MemoryBus, "count_chunks", count_chunks)
    world = VirtualRun(sync_spec(fragments=1, quorum=2, tokens=10**9))
    world.start_syncer()
    stays, leaves = (VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2))
    while not (keys := [key for key in world.store.values if ":delta:" in key and ":l1:" in key]):
        await asyncio.sleep(0.05)
    leaves.stop = True
    while not leaves.left:
        await asyncio.sleep(0.05)
    if not whole:
        for key in keys:
            world.store.delete(key)
    third = VirtualLearner("l2", world, 0.1, f"{2:016x}").start()
    await world.until_version(2, 120.0)
    tape = await world.tape()
    merged = {part.learner for one in tape if isinstance(one, Committed) for part in one.contributions}
    refused = {one.learner for one in tape if isinstance(one, Rejected) and "stopped" in one.detail}
    await end(stays, third)
    assert ("l1" in merged, "l1" in refused) == (whole, not whole)
    assert len(looks) == 1
