"""A learner that pulls against all others is shown, and left out where the run asks for it: in virtual time."""

import asyncio
from typing import Any

import numpy as np
import pytest
import structlog

from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.tape import Committed, RefusalReason, Rejected
from diloco.pipeline.testing.virtual_time import run_virtual
from diloco.pipeline.view.ledger import accounts, problems
from diloco.pipeline.view.ledger_inputs import read_ledger_inputs
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.standing import Standings
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec

BAD = "l4"


def flips(learner: VirtualLearner) -> None:
    """It trains as the others do, the other way."""

    def train() -> None:
        for values in learner.values:
            values -= 0.1 * (1.0 - values)
        learner.rounds.trained(10)

    learner.train = train  # type: ignore[method-assign]


def exaggerates(learner: VirtualLearner) -> None:
    """What it sends is twenty times as long as the others'."""

    def train() -> None:
        for values in learner.values:
            values += 2.0 * (1.0 - values)
        learner.rounds.trained(10)

    learner.train = train  # type: ignore[method-assign]


def started(world: VirtualRun, count: int = 5) -> list[VirtualLearner]:
    return [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(count)]


async def until_at_odds(world: VirtualRun, *names: str) -> None:
    async with asyncio.timeout(60):
        while any(head.window.at_odds != names for head in await world.heads()):
            await asyncio.sleep(0.05)


def committed(tape: list[Any], after: int = 0) -> list[Committed]:
    return [record for record in tape if isinstance(record, Committed) and record.version > after]


@pytest.mark.parametrize("leave_out", [False, True])
def test_one_of_five_that_pulls_against_the_others_is_shown_and_left_out_where_asked(leave_out: bool) -> None:
    """Within eight versions: in status, heads, tape and metrics, and in its own log once it is left out. Its tokens are
    rejected, and the ledger closes."""

    async def main() -> None:
        world = VirtualRun(sync_spec(tokens=20_000, quorum=3, leave_out=leave_out))
        service = world.start_syncer()
        learners = started(world)
        await world.until_version(2)
        flips(learners[4])
        began = max(await world.versions())
        await until_at_odds(world, BAD)
        found = max(await world.versions())
        assert found <= began + 8
        (warning,) = [w for w in (await read_status(world.bus, world.clock))["warnings"] if "at odds" in w]
        assert BAD in warning
        assert ("left out of merges" in warning) is leave_out
        assert service.metrics.registry.get_sample_value("diloco_at_odds_learners") == 1
        await world.finish(*learners)
        tape = await world.tape()
        late = committed(tape, found + 2)
        assert len(late) > 10
        theirs = [part for record in late for part in record.contributions if part.learner == BAD]
        refused = [r for r in tape if isinstance(r, Rejected) and r.reason is RefusalReason.AT_ODDS]
        assert {record.at_odds for record in late} == {(BAD,)}
        assert bool(theirs) is not leave_out
        assert {r.learner for r in refused} == ({BAD} if leave_out else set())
        if theirs:
            assert max(part.cosine for part in theirs if part.cosine is not None) < 0
        assert (await read_status(world.bus, world.clock))["phase"] == "finished"
        inputs = await read_ledger_inputs(world.bus, 2, 5.0)
        assert problems(accounts(tape, inputs, layout_of(world.spec.tensors))) == []

    with structlog.testing.capture_logs() as logs:
        run_virtual(main())
    told = [one for one in logs if one["event"] == "delta_rejected" and "lost_tokens" in one]
    assert [(one["learner"], one["reason"]) for one in told] == ([(BAD, "at_odds")] if leave_out else [])
    assert all("loss (is its sign right" in one["detail"] for one in told)


def test_a_window_whose_commit_fails_counts_once_in_the_standings() -> None:
    """Each commit fails at first, and its window is committed anew: standings are what the tape's records make them."""

    async def main() -> None:
        world, failed = VirtualRun(sync_spec(tokens=10**9, quorum=3, fragments=1)), 0
        service = world.start_syncer()
        learners = started(world)
        await world.until_version(2)
        flips(learners[4])
        standings = service.serving.context.standings
        bus: Any = service.serving.context.bus
        commit, told = bus.commit, committed(await world.tape())[-1].version
        tried = set[int]()

        async def fails_first(given: Any) -> None:
            nonlocal failed
            if given.version not in tried:
                tried.add(given.version)
                failed += 1
                raise BusUnavailable("for a moment")
            await commit(given)

        bus.commit = fails_first
        await world.until_version(told + 5)
        bus.commit = commit
        for learner in learners:
            await learner.kill()
        await asyncio.sleep(2.0)
        assert failed >= 4
        by_tape = Standings()
        for record in committed(await world.tape()):
            by_tape.observe({part.learner: part.cosine for part in record.contributions})
        for name in (f"l{number}" for number in range(5)):
            assert standings.of(name) == pytest.approx(by_tape.of(name))
        assert standings.of(BAD) < 0.9

    run_virtual(main())


def test_who_is_left_out_comes_back_once_it_agrees() -> None:
    async def main() -> None:
        world = VirtualRun(sync_spec(tokens=10**9, quorum=3, leave_out=True))
        world.start_syncer()
        learners = started(world)
        await world.until_version(2)
        train = learners[4].train
        flips(learners[4])
        await until_at_odds(world, BAD)
        learners[4].train = train  # type: ignore[method-assign]
        await until_at_odds(world)
        was = max(await world.versions())
        await world.until_version(was + 3)
        late = committed(await world.tape(), was + 1)
        assert any(part.learner == BAD for record in late for part in record.contributions)
        for learner in learners:
            await learner.kill()

    run_virtual(main())


def test_who_is_left_out_counts_for_no_quorum_and_nobody_waits_for_it() -> None:
    """Two of three honest ones are no quorum of three; status says why nothing is merged."""

    async def main() -> None:
        world = VirtualRun(sync_spec(tokens=10**9, quorum=3, leave_out=True))
        world.start_syncer()
        learners = started(world, 4)
        await world.until_version(2)
        flips(learners[3])
        await until_at_odds(world, "l3")
        was = max(await world.versions())
        await world.until_version(was + 4)
        assert max(record.grace_s for record in committed(await world.tape(), was + 2)) < 0.5
        await learners[2].kill()
        await asyncio.sleep(10.0)
        stopped = await world.versions()
        await asyncio.sleep(10.0)
        assert await world.versions() == stopped
        assert (await read_status(world.bus, world.clock))["warnings"][0] == "quorum 3 > 2 live, without 1 at odds"
        for learner in learners:
            await learner.kill()

    run_virtual(main())


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_a_long_delta_is_merged_at_the_length_that_the_run_allows(merge: str) -> None:
    """The tape says each contribution's factor; no global goes beyond where the others pull."""

    async def main() -> list[Committed]:
        world = VirtualRun(sync_spec(tokens=10_000, quorum=5, merge=merge, delta_clip=2.0))
        world.start_syncer()
        learners = started(world)
        exaggerates(learners[4])
        await world.finish(*learners)
        return committed(await world.tape(), 1)

    merges = [record for record in run_virtual(main()) if len(record.contributions) >= 3]
    assert len(merges) > 10
    for record in merges:
        usual = float(np.median([part.norm for part in record.contributions]))
        for part in record.contributions:
            assert part.factor * part.norm <= 2.001 * usual or part.rebased
    theirs = [part.factor for record in merges for part in record.contributions if part.learner == BAD]
    others = [part.factor for record in merges for part in record.contributions if part.learner != BAD]
    assert min(theirs) < 0.5
    assert min(others) == 1.0
