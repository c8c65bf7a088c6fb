"""Which rank serves which fragment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.workers.ranks.placement import ServerPlacement

EQUAL = [1000] * 8
DEFAULT = [995, 995, 1041, 1041, 1002, 975, 975, 975]
"""Eight fragments as the built-in model of 54M parameters has them."""


def carried(sizes: list[int], ranks: int, rounds: int) -> tuple[list[int], int]:
    """What each rank has carried after so many rounds of all fragments; how often one has gone to another rank."""
    turns, sums, moves = ServerPlacement(sizes, ranks), [0] * ranks, 0
    for _ in range(rounds):
        for p, size in enumerate(sizes):
            rank = turns.choose(p)
            moves += rank != turns.servers[p]
            turns.carried(p, rank)
            sums[rank] += size
    return sums, moves


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("sizes", [EQUAL, DEFAULT])
def test_over_a_run_each_rank_carries_its_share(sizes: list[int], ranks: int) -> None:
    """Within 5 % after forty rounds, also where ranks do not divide the number of fragments."""
    sums, _ = carried(sizes, ranks, 40)
    assert max(sums) * ranks / sum(sums) <= 1.05


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_where_shares_are_even_all_fragments_stay(ranks: int) -> None:
    """What goes to another rank takes its residual along, so nothing goes for nothing."""
    assert carried(DEFAULT, ranks, 40)[1] == 0


@given(
    sizes=st.lists(st.integers(1, 99), min_size=1, max_size=9),
    ranks=st.integers(1, 7),
    order=st.lists(st.integers(0, 8), max_size=60),
)
def test_no_rank_ever_serves_more_than_the_fullest_has_room_for(sizes, ranks, order) -> None:
    """In whatever order fragments are merged: as many of the largest as their even number, rounded up; or its own."""
    turns = ServerPlacement(sizes, ranks)
    load = [sum(size for p, size in enumerate(sizes) if turns.servers[p] == rank) for rank in range(ranks)]
    room = max(*load, -(-len(sizes) // ranks) * max(sizes))
    for p in order:
        if p < len(sizes):
            rank = turns.choose(p)
            turns.carried(p, rank)
            load = [sum(size for q, size in enumerate(sizes) if turns.servers[q] == rank) for rank in range(ranks)]
            assert max(load) <= room
