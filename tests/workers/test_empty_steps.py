"""Promises about inner steps that had nothing to train on: batches of which every token was masked."""

import pytest

from diloco.pipeline.messages.fragment import Committed, Rejected
from diloco.workers.rounds import OpenWindow
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec
from tests.workers.test_renewal import rounds_of


def test_a_fragment_that_is_due_waits_for_a_token() -> None:
    """It is published at the first step that has some, with all of its steps."""
    rounds = rounds_of(4)
    for _ in range(6):
        rounds.trained(0)
        assert not list(rounds.publications({}))
        assert not list(rounds.publications({0: OpenWindow(1, 0, False)}))
    rounds.trained(10)
    (publication,) = rounds.publications({})
    assert (publication.steps, publication.tokens, publication.due) == (7, 10, True)
    assert rounds.counts.steps == 7


def test_without_a_token_nothing_is_published_on_leaving() -> None:
    rounds = rounds_of(4)
    rounds.trained(0)
    assert not list(rounds.last({}, due=True))
    assert rounds.counts[1:4] == (0, 0, 0)


class Masked(VirtualLearner):
    """Has tokens in one of `every` steps."""

    every = 7

    def train(self) -> None:
        if self.rounds.steps % self.every == self.every - 1:
            super().train()
        else:
            self.rounds.trained(0)


class Empty(Masked):
    every = 10**9


@pytest.mark.parametrize("quorum", [1, 2])
@in_virtual_time
async def test_a_run_goes_on_past_empty_steps(quorum: int) -> None:
    """H is 4 and every seventh step has tokens: each round is merged in full, and no header is refused. One learner
    that never has any joins, follows and leaves."""
    world = VirtualRun(sync_spec(sync_interval=4, tokens=600, quorum=quorum))
    world.start_syncer()
    learners = [kind(f"l{i}", world, incarnation=f"{i:016x}").start() for i, kind in enumerate((Masked, Masked, Empty))]
    await world.finish(*learners)
    tape = await world.tape()
    assert not [record for record in tape if isinstance(record, Rejected)]
    merged = [record for record in tape if isinstance(record, Committed) and record.contributions]
    assert {c.learner for record in merged for c in record.contributions} == {"l0", "l1"}
    assert all(c.tokens > 0 for record in merged for c in record.contributions)
    assert len(merged) > 10
    assert all(learner.left for learner in learners)
    assert learners[2].rounds.steps > 100
