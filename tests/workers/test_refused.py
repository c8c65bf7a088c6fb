"""A learner whose deltas are refused says so in its own log."""

import asyncio
from typing import Any

import numpy as np
import structlog

from diloco.pipeline.testing.virtual_time import run_virtual
from tests.virtual_run import end, under_way


def test_a_learner_whose_delta_is_refused_says_why_and_what_to_do() -> None:
    """Once an episode: again only after one of its deltas was merged; the other learner says nothing."""

    async def main() -> list[Any]:
        world, learners = await under_way(2)
        train, poisoned = learners[0].train, True

        def training() -> None:
            train()
            if poisoned:
                learners[0].values[0][0] = np.nan

        learners[0].train = training  # type: ignore[method-assign]
        await asyncio.sleep(10)
        assert len(said()) == 1
        poisoned = False
        await world.until_version(max(await world.versions()) + 6)
        poisoned = True
        await asyncio.sleep(10)
        await end(*learners)
        return said()

    with structlog.testing.capture_logs() as logs:

        def said() -> list[Any]:
            return [one for one in logs if one["event"] == "delta_rejected" and "lost_tokens" in one]

        first, second = run_virtual(main())
    assert first["log_level"] == "warning"
    assert (first["fragment"], first["reason"]) == (0, "non_finite")
    assert "lower the learning rate" in first["detail"]
    assert second["reason"] == "non_finite"
