"""How often a learner calls the bus: each call wakes its exchange thread, which costs the training thread."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from diloco.pipeline.messages.fragment import Committed
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, sync_spec


class CountingBus(MemoryBus):
    """Counts the calls of one learner."""

    def __init__(self, clock: VirtualClock, store: Any) -> None:
        super().__init__(RUN, clock, store)
        self.calls: Counter[str] = Counter()

    async def write_report(self, *args: Any) -> Any:
        self.calls["reports"] += 1
        return await super().write_report(*args)

    async def read_heads(self, *args: Any) -> Any:
        self.calls["looks"] += 1
        return await super().read_heads(*args)

    async def read_chunks(self, *args: Any, extend_s: float = 0.0, **more: Any) -> Any:
        self.calls["extended"] += extend_s > 0
        return await super().read_chunks(*args, extend_s=extend_s, **more)


@pytest.mark.parametrize("step_s", [0.01, 0.1])
@in_virtual_time
async def test_a_merge_costs_a_lone_learner_one_look_and_hardly_more_than_one_report(step_s: float):
    """Its own delta opens the window: that is no news. Its adoption is told by the next delta's report, if that comes
    soon, else by one of its own."""
    run = VirtualRun(sync_spec(tokens=4000, quorum=1))
    buses = []

    class Learner(VirtualLearner):
        def connect(self) -> CountingBus:
            buses.append(CountingBus(run.clock, run.store))
            return buses[-1]

    run.start_syncer()
    learner = Learner("a", run, step_s=step_s)
    began = asyncio.get_running_loop().time()
    await run.finish(learner.start())
    took_s = asyncio.get_running_loop().time() - began
    merges = sum(isinstance(record, Committed) for record in await run.tape())
    assert merges > 30
    calls = buses[0].calls
    assert calls["looks"] <= merges + 24, "those of joining, before the run's state and version 0 are there, too"
    own = took_s / 0.3 + (merges if step_s > 0.05 else merges / 2)
    assert calls["reports"] <= merges + own + 12
    assert calls["extended"] == 0
