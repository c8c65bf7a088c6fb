"""What a real Redis loses while all connections stay up: all of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.messages.fragment import Rewound
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.view.status_reader import read_status
from tests.system.test_hostile_redis import RealRun, real_run, told

__all__ = ["told"]

pytestmark = [pytest.mark.redis]


async def has_spec(run: RealRun) -> bool:
    return bool(await run.bus.read_spec() == encode(run.spec))


async def has_state(run: RealRun) -> bool:
    return await run.bus.read_state() is not None


def names(told: list[dict[str, Any]]) -> set[str]:
    return {line["event"] for line in told}


async def goes_on(run: RealRun, what: str) -> None:
    """All heads are there, and rise."""

    async def whole() -> bool:
        return len(await run.heads()) == run.spec.sync.fragments

    await run.until(whole, f"all heads are there after {what}")
    await run.until_risen()


def test_flushall_under_a_running_run_is_mended_and_said(redis_binary: Path | None, told: list[dict[str, Any]]) -> None:
    """Nobody is started again: versions go on from where they were, and log and tape say what happened."""

    async def main() -> None:
        async with real_run(redis_binary, 2) as run:
            for _ in range(3):
                before = [head.version for head in await run.heads()]
                state = await run.bus.read_state()
                await run.bus._redis.on_all_nodes("FLUSHALL")
                await goes_on(run, "FLUSHALL")
                assert all(h.version > was for h, was in zip(await run.heads(), before, strict=True))
                await run.until(lambda: has_state(run), "the state is back")
                assert (await run.bus.read_state()).started_unix_s == state.started_unix_s
                await run.until(lambda: has_spec(run), "the spec is back")
                assert any(isinstance(record, Rewound) for record in await run.tape())
            assert {"head_put_back", "spec_put_back"} <= names(told)
            status = await read_status(run.bus, run.clock)
            said = [text for text in status["warnings"] if not text.startswith("rounds take")]  # on a busy machine
            assert (status["phase"], said) == ("running", [])

    asyncio.run(main())
