"""The simulated world's onlooker of leases: what it calls a broken promise, and what it allows for."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.world.link import Link
from tests.world.plan import plan
from tests.world.takeover import Takeover
from tests.world.world import World

LEASE_S = 0.5
TWO = ["syncer-0.1", "syncer-1.1"]


def first_broken(watch: Takeover, what: Callable[[float], tuple[bool, list[str], bool]]) -> float | None:
    """When an onlooker that looks twenty times a second for five seconds first complains of fragment 1."""
    for tick in range(100):
        free, able, well = what(now := tick / 20)
        if watch.look(now, [False, free], able, well):
            return now
    return None


def test_a_lease_that_stays_free_for_two_lease_times_breaks_the_promise() -> None:
    """Not one that is taken in between, nor one that nobody can take."""
    assert first_broken(Takeover(2, LEASE_S), lambda now: (now >= 1.0, TWO, True)) == pytest.approx(2.05)
    assert first_broken(Takeover(2, LEASE_S), lambda now: (now % 1.0 > 0.1, TWO, True)) is None
    assert first_broken(Takeover(2, LEASE_S), lambda now: (True, [], True)) is None


def test_a_fragment_whose_head_is_lost_too_is_left_for_two_more_to_those_who_may_remember_it() -> None:
    """And for no longer."""
    watch = Takeover(2, LEASE_S)
    assert watch.look(0.0, [False, True], TWO, True, [1]) is None
    assert watch.look(1.95, [False, True], TWO, True, [1]) is None
    assert watch.look(2.05, [False, True], TWO, True, [1]) is not None


def test_one_that_was_taken_between_two_looks_was_taken() -> None:
    """Though at both it was free."""
    watch = Takeover(2, LEASE_S)
    assert watch.look(0.0, [True, True], TWO, True) is None
    watch.taken(0)
    broken = watch.look(1.05, [True, True], TWO, True)
    assert broken.startswith("fragment 1")


def test_what_costs_the_syncers_a_round_gives_them_two_lease_times_more() -> None:
    """Counted from its end; after that, there is no excuse."""
    assert first_broken(Takeover(2, LEASE_S), lambda now: (True, TWO[: 1 + (now < 0.8)], True)) == pytest.approx(1.85)
    assert first_broken(Takeover(2, LEASE_S), lambda now: (True, TWO, not 0.5 <= now < 0.9)) == pytest.approx(1.9)
    watch = Takeover(2, LEASE_S)

    def struck(now: float) -> tuple[bool, list[str], bool]:
        if now == 0.6:
            watch.disturbed(now)
        return True, TWO, True

    assert first_broken(watch, struck) == pytest.approx(1.65)


@pytest.mark.parametrize(("call", "allowed"), [("announce_syncer", True), ("read_state", False)])
@in_virtual_time
async def test_a_late_word_of_one_that_has_left_gives_two_lease_times_more(call: str, allowed: bool) -> None:
    """That it is here: the others leave its share to it once more. One that only reads is no excuse."""
    world = World(plan(0), None, 1, traced=False)
    world.takeover.look(0.0, [True], ["syncer-1.1"], True)
    await asyncio.sleep(0.6)
    late = SimpleNamespace(party="syncer-0", late=True, beside=False)
    world.observe(cast(Link, late), call, (), {}, None)
    assert (world.takeover.look(1.2, [True], ["syncer-1.1"], True) is None) is allowed
