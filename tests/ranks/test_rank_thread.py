"""How a rank's exchange thread ends."""

import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.pipeline.errors import LearnerReplaced, RankGone, UsageError
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.workers.ranks import rank_learner, shutdown
from diloco.workers.ranks.rank_learner import RankThread
from diloco.workers.ranks.shutdown import RankStopping


@pytest.mark.parametrize(
    "error", [RankGone("it"), LearnerReplaced("by another", 2), UsageError("not so"), KeyError("bug")]
)
@pytest.mark.parametrize("told", [True, False])
def test_whatever_ends_a_ranks_exchange_nobody_waits_for_ever(error: Exception, told: bool, monkeypatch: Any) -> None:
    """Groups are broken off, and a training thread that hears nothing of it is ended with its process."""
    done: list[object] = []
    monkeypatch.setattr(shutdown, "HANG_S", 0.01)
    monkeypatch.setattr(os, "_exit", done.append)
    training: Any = SimpleNamespace(learner="l0", times=SimpleNamespace(step_s=0.0))
    group: Any = SimpleNamespace(
        rank=1, connections={}, leak_groups=lambda: done.append("part"), abort=lambda: done.append("abort")
    )
    monkeypatch.setattr(rank_learner, "OwnThread", lambda name, work: SimpleNamespace(start=work))
    ranks: Any = None
    one = RankThread("redis://nowhere", "run", training, group, ranks, RankStopping())

    async def fail() -> None:
        raise error

    monkeypatch.setattr(one, "_join_and_work", fail)
    if told:
        one.notice()
    one._work()
    assert one.failure is error
    assert done == (["part", "abort"] if told else ["part", "abort", AGAIN_STATUS])


@pytest.mark.parametrize(("step_s", "within_s"), [(0.0, 10.0), (2.0, 10.0), (30.0, 60.0), (3600.0, 120.0)])
def test_a_step_is_given_the_time_that_steps_take(step_s: float, within_s: float, monkeypatch: Any) -> None:
    """Those of a large model take longer than ten seconds: one that waits for nobody comes to its end.

    But one step of an hour, such as an evaluation, has no learner be down for two.
    """
    waited: list[float] = []
    training: Any = SimpleNamespace(learner="l0", times=SimpleNamespace(step_s=step_s))
    group: Any = SimpleNamespace(rank=1, connections={}, leak_groups=lambda: None, abort=lambda: None)
    ranks: Any = None
    one = RankThread("redis://nowhere", "run", training, group, ranks, RankStopping())
    monkeypatch.setattr(one, "_noticed", SimpleNamespace(wait=lambda given: waited.append(given) or True))

    async def fail() -> None:
        raise RankGone("it")

    monkeypatch.setattr(one, "_join_and_work", fail)
    one._work()
    assert waited == [within_s]


def test_moments_that_are_being_saved_are_saved_though_nobody_can_be_told(monkeypatch: Any) -> None:
    """A process that is to end waits for them in any case."""
    saves = [True, True, False]

    class Keeper:
        @property
        def saves(self) -> bool:
            return saves.pop(0)

    training: Any = SimpleNamespace(learner="l0", times=SimpleNamespace(step_s=0.0), keeper=Keeper())
    group: Any = SimpleNamespace(rank=1, connections={}, abort=lambda: None)
    ranks: Any = None
    one = RankThread("redis://nowhere", "run", training, group, ranks, RankStopping())
    broken: Future[str] = Future()
    broken.set_exception(RankGone("it"))
    monkeypatch.setattr(RankThread, "works", True)
    monkeypatch.setattr(one, "_exchange", SimpleNamespace(report_end=lambda why, within_s: None))
    monkeypatch.setattr(one, "ask", lambda work: broken)
    with pytest.raises(RankGone):
        one._report_end("SIGTERM came", 5.0)
    assert not saves
