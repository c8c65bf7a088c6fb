"""To save a run and to resume it takes a few fragments' memory, not the model's."""

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path

import numpy as np
import pytest

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.payload.codec import encode
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.checkpoints.places import place_of
from diloco.syncer.checkpoints.restoring import restore_checkpoint
from tests import samples
from tests.saving import save_checkpoint

NONCE = "ab" * 8
FRAGMENTS, ELEMENTS = 32, 2**20
MODEL_BYTES = 4 * FRAGMENTS * ELEMENTS


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def begin_peak() -> int:
    """The peak is of what comes from now on; the bytes that there are."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


async def grown(work: Awaitable[object]) -> int:
    """Bytes of this process's peak while it works, beyond what it had before."""
    before = begin_peak()
    await work
    return resident("VmHWM") - before


@pytest.mark.redis
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_checkpoint_takes_no_memory_for_the_model(redis_server: str, tmp_path: Path) -> None:
    tensors = tuple(samples.tensor(f"t{p}", (ELEMENTS,), p) for p in range(FRAGMENTS))
    spec = samples.spec(tensors=tensors, fragments=FRAGMENTS, chunk_bytes=2**19)

    async def save() -> int:
        async with open_bus(redis_server, f"{tmp_path.name}-one") as bus:
            await bus.propose_spec(encode(spec))
            await bus.write_state(samples.run_state(tokens=900))
            values = np.ones(ELEMENTS, np.float32)
            for p in range(FRAGMENTS):
                await samples.commit(bus, p, 3, values, momentum=values, chunk_bytes=2**19)
            return await grown(save_checkpoint(bus, spec, place_of(tmp_path)))

    async def resume() -> int:
        async with open_bus(redis_server, f"{tmp_path.name}-two") as bus:
            for p in range(FRAGMENTS):
                assert await bus.acquire_lease(p, NONCE, 1e6)

            async def work() -> None:
                checkpoint = await asyncio.to_thread(load_checkpoint, tmp_path)
                await restore_checkpoint(bus, checkpoint, spec, NONCE, "s", LoopClock())

            return await grown(work())

    assert asyncio.run(save()) < MODEL_BYTES / 2
    assert asyncio.run(resume()) < MODEL_BYTES / 2
