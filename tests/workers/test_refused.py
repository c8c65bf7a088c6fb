"""A learner whose deltas are refused says so in its own log."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import structlog
import torch
from torch import nn

from diloco.pipeline.errors import LearnerDiverged, exit_status
from diloco.pipeline.messages.fragment import Contribution, RefusalReason, Rejected
from diloco.pipeline.settings import SyncSettings
from diloco.workers.exchange.refused import Refused
from diloco.workers.exchange.shared import Shared
from diloco.workers.learner import Learner
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests import samples
from tests.virtual_run import end, under_way
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import until


@in_virtual_time
async def test_a_learner_whose_delta_is_refused_says_why_and_what_to_do() -> None:
    """Once an episode: again only after one of its deltas was merged; the other learner says nothing."""

    def said() -> list[Any]:
        return [one for one in logs if one["event"] == "delta_rejected" and "lost_tokens" in one]

    async def refused(times: int) -> None:
        async with asyncio.timeout(20):
            while len(said()) < times:
                await asyncio.sleep(0.05)

    with structlog.testing.capture_logs() as logs:
        world, learners = await under_way(2)
        train, poisoned = learners[0].train, True

        def training() -> None:
            train()
            if poisoned:
                learners[0].values[0][0] = np.nan

        learners[0].train = training  # type: ignore[method-assign]
        await refused(1)
        await asyncio.sleep(0.5)
        poisoned = False
        await world.until_version(max(await world.versions()) + 6)
        assert len(said()) == 1
        poisoned = True
        await refused(2)
        await end(*learners)
    first, second = said()
    assert first["log_level"] == "warning"
    assert (first["fragment"], first["reason"]) == (0, "non_finite")
    assert "lower the learning rate" in first["detail"]
    assert second["reason"] == "non_finite"


MERGED = Contribution(
    learner="l0", incarnation="0" * 8, base_version=0, attempt=0, steps=1, tokens=1, weight=1.0, norm=1.0
)


def refused_by(newest: dict[int, tuple[int, int]]) -> tuple[Refused, Shared]:
    """What hears of l0's deltas, and what it tells the training thread."""
    shared = Shared()
    member = SimpleNamespace(learner="l0", incarnation="0" * 8, log=structlog.get_logger(), shared=shared)
    return Refused(cast(Any, member), newest), shared


def rejection(attempt: int = 0, reason: RefusalReason = RefusalReason.NON_FINITE, **given: Any) -> Rejected:
    header = samples.header(**{"attempt": attempt, **given})
    return Rejected.of(header, (0, 0), lost_tokens=0, reason=reason, detail="", unix_s=1.0)


def test_a_learner_heals_after_three_deltas_that_are_not_finite_and_ends_after_three_more() -> None:
    """What was on its way as it was healed says nothing, nor do others' deltas, nor a merge that would overflow."""
    newest = {0: (0, 2)}
    heard, shared = refused_by(newest)
    for _ in range(9):
        heard.refused(rejection(learner="another"))
        heard.refused(rejection(reason=RefusalReason.MERGE_NOT_FINITE))
        heard.refused(rejection(reason=RefusalReason.ABSURD_NORM))
    for attempt in (0, 1):
        heard.refused(rejection(attempt))
    assert not shared.heal
    with structlog.testing.capture_logs() as logs:
        heard.refused(rejection(2))
    assert shared.heal
    (said,) = [one["detail"] for one in logs if one["event"] == "learner_diverged"]
    assert "moments" not in said, "not every learner can drop them: who does says so"
    for _ in range(9):
        heard.refused(rejection(1))
        heard.refused(rejection(2))
    for attempt in (3, 4):
        heard.refused(rejection(attempt))
    with pytest.raises(LearnerDiverged, match="lower the learning rate"):
        heard.refused(rejection(0, base_version=1))


def test_a_learner_that_was_merged_meanwhile_heals_once_more() -> None:
    """It is another episode."""
    heard, shared = refused_by({})
    for _ in range(3):
        for attempt in range(3):
            heard.refused(rejection(attempt))
        assert shared.heal
        shared.heal = False
        heard.merged(samples.committed(contributions=(MERGED,)))
        assert not heard.fragments


def test_a_fragment_that_is_merged_beside_the_one_that_is_not_finite_is_no_recovery() -> None:
    """A gradient that is NaN leaves other tensors finite for a step."""
    heard, shared = refused_by({})
    beside = samples.committed(fragment=1, contributions=(MERGED,))
    for attempt in range(3):
        heard.refused(rejection(attempt))
        heard.merged(beside)
    assert shared.heal
    for attempt in range(2):
        heard.refused(rejection(attempt))
        heard.merged(beside)
    with pytest.raises(LearnerDiverged):
        heard.refused(rejection(2))


@pytest.mark.redis
def test_a_model_that_became_nan_goes_on_from_the_globals_with_fresh_moments(redis_server: str) -> None:
    """Parameters and moments are finite again and its deltas are merged; what stays NaN ends, to be restarted."""
    sync = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1, tokens=10**9, global_codec="fp32")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(learner: Learner, scale: float = 1.0) -> None:
        (scale * model(torch.ones(2, 4)).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=10)

    def until_version(learner: Learner, version: int, scale: float = 1.0) -> None:
        until(lambda: min(learner.joined.training.rounds.versions) >= version or step(learner, scale))

    given = {"run": "nan", "redis_url": redis_server, "learner_id": "l0", "sync": sync, "leave_s": 5.0}
    with a_syncer(redis_server, "nan"), structlog.testing.capture_logs() as logs:
        learner = Learner(model, optimizer, **given).open()  # type: ignore[arg-type]
        until_version(learner, 2)
        step(learner, math.nan)  # which may have adopted a global since: its moments stay as they are
        assert optimizer.state[model.weight]["exp_avg"].isnan().all()
        until_version(learner, min(learner.joined.training.rounds.versions) + 4)
        assert model.weight.isfinite().all()
        assert all(one["exp_avg"].isfinite().all() for one in optimizer.state.values())
        with pytest.raises(LearnerDiverged) as told:
            until_version(learner, 10**9, math.nan)
        learner.close()
    assert exit_status(told.value) == 1
    assert [one["event"] for one in logs].count("learner_diverged") == 2
    healed = [one["detail"] for one in logs if one["event"] == "learner_healed"]
    assert healed == ["it continues from the globals, with fresh moments"] * 2
