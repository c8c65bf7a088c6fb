"""What changes in the course of a run is a function of a fragment's version, and the same for all who look."""

import numpy as np
import pytest

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.spec import Spec, TensorSpec
from diloco.pipeline.ramps import interval_at
from diloco.pipeline.settings import SyncSettings
from diloco.syncer.merging.outer import State, outer_at
from diloco.workers.rounds import Base, Rounds
from tests import samples
from tests.virtual_run import PLAIN


def sync(**told):
    return SyncSettings(**{"fragments": 2, "sync_interval": 24, "tokens": 1000, **PLAIN, **told}).sync_spec()


def test_the_interval_doubles_up_to_h():
    """From 1 or 3; without a first one it is H, and one above H is H."""
    versions = (0, 1, 2, 3, 4, 5, 6, 10**6)
    assert [interval_at(sync(first_interval=1), v) for v in versions] == [1, 2, 4, 8, 16, 24, 24, 24]
    assert [interval_at(sync(first_interval=3), v) for v in versions] == [3, 6, 12, 24, 24, 24, 24, 24]
    slow = [interval_at(sync(first_interval=2, doubling=8), v) for v in range(40)]
    assert slow == [2] * 8 + [4] * 8 + [8] * 8 + [16] * 8 + [24] * 8
    assert {interval_at(sync(), v) for v in versions} == {24}
    assert {interval_at(sync(first_interval=99), v) for v in versions} == {24}


def test_the_first_outer_steps_only_average():
    """Then the rate and the momentum asked for; by default from the first step on."""
    told = sync(outer_lr=0.7, outer_momentum=0.9, outer_warmup=2)
    assert [outer_at(told, v, [24]) for v in (0, 1, 2, 3)] == [(1.0, 0.0), (1.0, 0.0), (0.7, 0.9), (0.7, 0.9)]
    assert outer_at(sync(outer_lr=0.7), 0, [24]) == (0.7, 0.0)


def test_what_is_left_behind_at_the_end_of_a_run_is_only_averaged():
    """Where no delta holds half an interval; momentum would repeat a whole interval's way. One that does is enough."""
    told = sync(outer_lr=0.7, outer_momentum=0.9)
    assert outer_at(told, 5, [1, 11]) == (1.0, 0.0)
    assert outer_at(told, 5, [1, 12]) == (0.7, 0.9)
    assert outer_at(told, 5, [1, 12], told=25) == (1.0, 0.0), "half of what its head says"
    growing = sync(outer_lr=0.7, outer_momentum=0.9, first_interval=2, doubling=8)
    assert outer_at(growing, 0, [1]) == (0.7, 0.9)
    assert outer_at(growing, 8, [1]) == (1.0, 0.0)


def test_no_momentum_is_gathered_while_it_has_no_say():
    """A mean of what was learnt during the warm-up would push the first real step; here that one starts from zero."""
    told = sync(fragments=1, outer_lr=0.7, outer_momentum=0.9, outer_warmup=1)
    table = (TensorSpec(name="t", shape=(4,), dtype="float32", rule="mean", fragment=0),)
    layout = layout_of(Spec(sync=told, tensors=table, trainer={}).tensors).fragments[0]
    delta = np.array([1, -2, 3, -4], np.float32)
    first = samples.outer_step(told, (1.0, 0.0), State(np.zeros(4, np.float32), None), layout, delta)
    assert first.momentum is None
    assert np.array_equal(first.theta, -delta)
    second = samples.outer_step(told, (0.7, 0.9), State(first.theta, first.momentum), layout, delta)
    assert np.array_equal(second.momentum, delta)
    assert np.allclose(second.theta, -delta - 0.7 * (delta + 0.9 * delta))


@pytest.mark.parametrize("joins_at", [0, 3])
def test_learners_publish_when_the_interval_of_their_base_is_over(joins_at):
    """First at 2, then at 4, 8: whatever they have adopted before. Who joins at version 3 begins with version 3's."""
    told = sync(fragments=1, first_interval=2, sync_interval=12)
    table = (TensorSpec(name="t", shape=(4,), dtype="float32", rule="mean", fragment=0),)
    rounds = Rounds(layout_of(Spec(sync=told, tensors=table, trainer={}).tensors), told)
    values = np.zeros(4, np.float32)
    waited = []
    for version in range(joins_at, joins_at + 4):
        rounds.adopt(Base(0, version, bytes(16), values))
        steps = 0
        while True:
            rounds.trained(1)
            steps += 1
            if list(rounds.publications({})):
                break
        waited.append(steps)
    assert waited == ([1, 4, 8, 12] if joins_at == 0 else [13, 12, 12, 12])
