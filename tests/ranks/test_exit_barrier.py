"""Ranks that leave their loops: after the same step, or all of them hear of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from diloco.pipeline.errors import RankGone
from diloco.workers.ranks import shutdown
from diloco.workers.ranks.shutdown import ExitBarrier
from tests import HANGING_S
from tests.ranks.party import Party
from tests.ranks.test_learner_broken import STEPS, crew
from tests.ranks.test_transport import connected_ranks


async def leave(who: list[int]) -> list[Any]:
    """Have some of three ranks leave their loops; what each hears: of the others' leaving, or why all end."""
    async with asyncio.timeout(HANGING_S):
        members, _ = await crew()
        left = asyncio.gather(*(members[rank].exit_barrier.wait_for_all() for rank in who))
        ended = asyncio.gather(*(one.task for one in members), return_exceptions=True)
        done, _ = await asyncio.wait({left, ended}, return_when=asyncio.FIRST_COMPLETED)
        for one in {left, ended} - done:
            one.cancel()
        await asyncio.gather(left, ended, return_exceptions=True)
        return done.pop().result()


async def test_ranks_that_leave_after_the_same_step_wait_for_each_other() -> None:
    """Nobody is told of an error."""
    assert await leave([0, 1, 2]) == [None] * 3


@pytest.mark.parametrize("who", [[1], [0, 2]])
async def test_ranks_that_train_on_are_named_to_all(who: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By those that have left, once they have waited; who trains on hears the same, and not that somebody is gone."""
    monkeypatch.setattr(shutdown, "LEAVE_TOGETHER_S", 0.05)
    for error in await leave(who):
        assert isinstance(error, RankGone)
        left, others = str(error).split("these did not")
        for rank in range(3):
            told = f"rank {rank} after step {STEPS}"
            assert (told in left, told in others) == (rank in who, rank not in who)


async def test_where_ranks_wait_for_each_other_it_is_said_how_far_each_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while without a step, and not where all have made as many."""
    monkeypatch.setattr(shutdown, "APART_S", 0.01)
    async with connected_ranks(2) as transport:
        parts = [ExitBarrier(one) for one in transport]
        with structlog.testing.capture_logs() as logs:
            parts[0].steps = parts[1].steps = 7
            watching = asyncio.create_task(parts[0].watch())
            await asyncio.sleep(0.1)
            assert not logs
            parts[1].steps = 5
            while not logs:
                await asyncio.sleep(0.01)
            watching.cancel()
        assert (logs[0]["event"], logs[0]["steps"]) == ("ranks_apart", [7, 5])


CASES = {"later": ("ddp", "1 break 25"), "first": ("fsdp", "0 break 25"), "error": ("ddp", "1 raise 25")}


@pytest.mark.redis
@pytest.mark.slow
def test_a_rank_that_leaves_while_others_train_on_is_named_by_all(tmp_path: Path) -> None:
    """Rank 1 of DDP, rank 0 of FSDP2, and one whose data loader fails: all ranks end with an error, and say why."""
    with Party(tmp_path, sync_interval=6, fragments=4, tokens=10**9) as party:
        pairs = {name: party.learner(kind, name, 2, TEST_ERRS=errs) for name, (kind, errs) in CASES.items()}
        assert all(party.ended(*(rank for pair in pairs.values() for rank in pair))), party.shown()
        for name, gone, other in ("later", 1, 0), ("first", 0, 1):
            for rank in range(2):
                told = "\n".join(party.said(f"{name}-{rank}", ""))
                assert f"left their loops: rank {gone} after step 25; within " in told
                assert f"rank {other} after step 25" in told
        (told,) = party.said("error-0", "rank_gone")
        assert "rank 1 of this learner left its loop at step 26 by OSError('the data has ended')" in told
