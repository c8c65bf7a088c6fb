"""What one learner's password can do to the others' windows by reports: whole runs in virtual time."""

import asyncio
import itertools
from collections.abc import Callable
from statistics import fmean

import pytest

from diloco.pipeline.messages.fragment import Committed
from diloco.syncer.admission import ASKED_AGAIN, STRANGERS, SUSPECTED_AFTER, Suspects
from diloco_studies.virtual.virtual_time import run_virtual
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

STEPS_S = (0.1, 0.11)
LIES = {"step_s": 1e9, "step_s_median": 1e9, "pull_s": 0.0}


async def make_up(world: VirtualRun, names: Callable[[], list[str]], **said: float) -> None:
    """Report under these names, at the versions of now, as often as a learner can."""
    for number in itertools.count():
        versions = tuple(head.version for head in await world.heads())
        if len(versions) == world.spec.sync.fragments:
            for name in names():
                given = {"versions": versions, "number": number, "left": False, **said}
                await world.bus.write_report(samples.report(name, **given))
        await asyncio.sleep(0.02)


def merges(names: Callable[[], list[str]], seconds: float = 60.0, **said: float) -> tuple[list[Committed], list[int]]:
    """(commits, intervals in the end) of two learners' run beside made-up ones."""

    async def main() -> tuple[list[Committed], list[int]]:
        world = VirtualRun(sync_spec(tokens=10**12, sync_interval=8, overlap_steps=2, grace_gamma=0.9))
        service = world.start_syncer()
        party = [VirtualLearner(f"l{i}", world, step_s, f"{i:016x}") for i, step_s in enumerate(STEPS_S)]
        for learner in party:
            learner.start()
        await world.until_version(2)
        liar = asyncio.create_task(make_up(world, names, **said))
        await asyncio.sleep(seconds)
        liar.cancel()
        commits = [r for r in await world.tape() if isinstance(r, Committed) and r.contributions]
        heads = await world.heads()
        for owner, head in zip(service.owners, heads, strict=True):
            assert owner.suspected == set(head.window.suspected), "metrics count whom heads name"
        intervals = [head.interval for head in heads]
        await end(*party)
        world.syncer.cancel()  # type: ignore[union-attr]
        return commits, intervals

    return run_virtual(main())


def three() -> list[str]:
    return ["x0", "x1", "x2"]


def test_made_up_learners_with_endless_steps_stop_nobody() -> None:
    """Windows wait for them for some steps of the others', three times; then as if they were not there."""
    (usual, _), (beside, _) = merges(list), merges(three, **LIES)
    assert len(beside) > 0.7 * len(usual)
    assert max(c.grace_s for c in beside) < 3.0
    assert fmean(c.grace_s for c in beside[len(beside) // 2 :]) < fmean(c.grace_s for c in usual) + 0.15
    assert fmean(len(c.contributions) for c in beside) > 1.9


def test_names_that_change_are_waited_for_no_longer() -> None:
    """However often other learners are made up: no more windows wait for them."""
    numbers = itertools.count()
    (usual, _), (beside, _) = merges(list), merges(lambda: [f"x{next(numbers) // 30}"], **LIES)
    assert max(c.grace_s for c in beside[4:]) <= 12.5 * max(STEPS_S) + 0.1
    assert len(beside) > 0.7 * len(usual)


def test_made_up_learners_with_short_steps_stretch_no_interval() -> None:
    """Nor do long pulls that nobody has: what counts is what was merged."""
    _, intervals = merges(lambda: ["x0", "x1", "x2", "x3"], step_s=0.002, step_s_median=0.002, pull_s=60.0)
    assert intervals == [8, 8]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("heard", [True, False])
def test_who_sends_no_header_is_not_waited_for_until_it_does(heard: bool, known: bool) -> None:
    """After three windows; and then by each sixteenth, lest steps that have become long keep a learner out for ever.

    Of whom nothing was merged lately, other names make no difference.
    """
    suspects, waited, merged = Suspects(), 0, ["x"] if known else []
    for window in range(1, 4 * ASKED_AGAIN + 1):
        name = "x" if known else f"x{window}"
        awaited = name not in suspects.among([name], merged)
        waited += awaited
        assert awaited == (window <= SUSPECTED_AFTER or (window - 1) % ASKED_AGAIN == 0 or heard)
        suspects.closed([name] if awaited else [], merged)
        if heard:
            suspects.header_arrived("x" if known else STRANGERS)
    assert waited == (4 * ASKED_AGAIN if heard else SUSPECTED_AFTER + 3)


def test_no_number_of_silent_learners_is_remembered_without_end() -> None:
    """The longest silent ones go."""
    suspects = Suspects()
    for first in range(0, 20_000, 1000):
        names = [f"x{n}" for n in range(first, first + 1000)]
        suspects.closed(names, names)
    assert len(suspects._silent) <= 4096
