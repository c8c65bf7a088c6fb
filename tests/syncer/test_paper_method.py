"""What docs/reference/methods.md says of `--method paper`, as far as a tape shows it."""

from collections import defaultdict
from itertools import pairwise

import pytest

from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.ramps import interval_in_force
from diloco.pipeline.settings import SyncSettings
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.syncer.test_round_trips import SlowMerges
from tests.virtual_run import VirtualLearner, end

H = P = 24
STEP_S, MERGE_S = 0.1, 0.35
TRIP = 8
"""Steps that a round trip may take: the merge, calls, and the step in which a learner adopts."""


@in_virtual_time
async def test_a_tape_of_the_papers_method_is_as_its_table_says() -> None:
    """Also where round trips take four steps, which would make rounds of the defaults twice as long."""
    sync = SyncSettings(method="paper", tokens=10**9).with_method().sync_spec()
    assert (sync.fragments, sync.sync_interval) == (P, H)
    world = SlowMerges(sync)
    world.merge_s = MERGE_S
    world.start()
    party = [VirtualLearner(f"l{i}", world, STEP_S, f"{i:016x}").start() for i in range(3)]
    await world.until_version(6, 600)
    merges = defaultdict(list)
    for record in await world.tape():
        if isinstance(record, Committed) and record.contributions:
            merges[record.fragment].append(record)
    for p, records in merges.items():
        in_force = {interval_in_force(sync, one.version - 1, one.interval) for one in records}
        assert in_force == {H}, "no round is made longer, none begins shorter"
        assert {one.steps for one in records[0].contributions} == {1 + p}, "offsets are distinct"
        for record in records[1:]:
            steps = [one.steps for one in record.contributions if not one.rebased]
            assert steps
            assert max(steps) <= H + 1, "a learner publishes H steps after it adopted"
            assert min(steps) >= H - 1
        for before, after in pairwise(records):
            steps = (after.unix_s - before.unix_s) / STEP_S
            assert H <= steps <= H + TRIP, "a round is H and a round trip"
        for record in records:
            rates = [one.tokens**2 / one.steps for one in record.contributions]
            weights = [rate / sum(rates) for rate in rates]
            assert [one.weight for one in record.contributions] == pytest.approx(weights)
    await end(*party)
    await world.kill_syncer()
