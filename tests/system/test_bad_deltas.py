"""A reversed learner is seen by its cosine, and a long delta is cut where the run asks for it: in virtual time."""

from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.view.page.collector import Collector
from diloco.syncer.run_metrics import RunMetrics
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, sync_spec

BAD = "l4"


def flips(learner: VirtualLearner) -> None:
    """It trains as the others do, the other way."""

    def train() -> None:
        for values in learner.values:
            values -= 0.1 * (1.0 - values)
        learner.rounds.trained(10)

    learner.train = train  # type: ignore[method-assign]


def exaggerates(learner: VirtualLearner) -> None:
    """What it sends is three times as long as what the others do."""

    def train() -> None:
        for values in learner.values:
            values += 0.9 * (1.0 - values)
        learner.rounds.trained(10)

    learner.train = train  # type: ignore[method-assign]


def started(world: VirtualRun) -> list[VirtualLearner]:
    return [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(5)]


def committed(tape: list[Any]) -> list[Committed]:
    """After the first merge."""
    return [record for record in tape if isinstance(record, Committed) and record.version > 1]


@in_virtual_time
async def test_the_cosine_of_a_reversed_learner_is_negative_on_the_tape_and_in_the_metrics() -> None:
    """Every other learner's is positive. Nothing follows from it: its deltas are merged as the others' are."""
    world = VirtualRun(sync_spec(tokens=20_000, quorum=5))
    world.start_syncer()
    learners = started(world)
    flips(learners[4])
    await world.until_version(4)
    collector = Collector(MemoryBus(RUN, world.clock, world.store), world.clock)
    await collector.poll()
    registry = CollectorRegistry()
    registry.register(RunMetrics(collector.reading, world.clock, lambda: True))
    metrics = {
        learner.name: registry.get_sample_value("diloco_learner_cosine", {"learner": learner.name})
        for learner in learners
    }
    await world.finish(*learners)
    early = [record for record in committed(await world.tape()) if record.version < 8]  # then all is learned
    assert len(early) >= 10
    for record in early:
        told = {part.learner: part.cosine for part in record.contributions}
        assert len(told) == 5
        assert {learner for learner, cosine in told.items() if cosine is not None and cosine < 0} == {BAD}
        assert None not in told.values()
    assert {learner for learner, cosine in metrics.items() if cosine is not None and cosine < 0} == {BAD}
    assert None not in metrics.values()


@pytest.mark.parametrize("merge", ["mean", "rda"])
@in_virtual_time
async def test_a_long_delta_is_merged_at_the_length_that_the_run_allows(merge: str) -> None:
    """The tape says each contribution's factor; no global goes beyond where the others pull."""
    world = VirtualRun(sync_spec(tokens=10_000, quorum=5, merge=merge, delta_clip=1.4))
    world.start_syncer()
    learners = started(world)
    exaggerates(learners[4])
    await world.finish(*learners)
    found = [record for record in committed(await world.tape()) if len(record.contributions) >= 3]
    merges = [record for record in found if record.version < 12]  # later ones have nothing left to learn
    assert len(merges) > 10
    for record in merges:
        usual = float(np.median([part.norm for part in record.contributions]))
        for part in record.contributions:
            assert part.factor * part.norm <= 1.401 * usual or part.rebased
    theirs = [part.factor for record in merges for part in record.contributions if part.learner == BAD]
    others = [part.factor for record in merges for part in record.contributions if part.learner != BAD]
    assert min(theirs) < 0.5
    assert min(others) == 1.0
