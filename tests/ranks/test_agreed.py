"""What ranks tell each other at each step, and what rank 0 decides."""

from hypothesis import given
from hypothesis import strategies as st

from diloco.workers.ranks.agreed import PARTS, Decided, numbers, read
from diloco.workers.ranks.under_way import SMALL, Room, UnderWay


@given(
    tokens=st.lists(st.integers(0, 2**40), min_size=1, max_size=9),
    stops=st.lists(st.booleans(), min_size=9, max_size=9),
    over=st.booleans(),
    parts=st.integers(0, PARTS),
    taken=st.lists(st.frozensets(st.integers(0, 6)), min_size=9, max_size=9),
    adoptions=st.dictionaries(st.integers(0, 6), st.integers(1, 2**40)),
)
def test_the_sum_tells_all_what_is_to_be_done_and_what_was(tokens, stops, over, parts, taken, adoptions):
    """However many ranks there are: decisions are rank 0's alone, tokens are of all, one that stops stops all.

    A snapshot counts once all have taken one at the same step.
    """
    decided, ranks = Decided(over, parts / PARTS, adoptions), len(tokens)
    told = [
        numbers(one, stops[rank], 7, taken[rank], decided if rank == 0 else Decided())
        for rank, one in enumerate(tokens)
    ]
    agreed = read([sum(column) for column in zip(*told, strict=True)], ranks)
    assert agreed.decided == decided
    assert agreed.tokens == sum(tokens)
    assert agreed.stop == any(stops[:ranks])
    assert agreed.snapshots == frozenset.intersection(*taken[:ranks])


LARGE = Room([SMALL] * 4)


def test_of_a_server_one_snapshot_is_under_way_at_a_time() -> None:
    """So that it needs the room of one fragment; its next one waits until the first is uploaded."""
    under_way, servers = UnderWay(LARGE), {0: 0, 1: 1, 2: 0, 3: 1}
    assert under_way.snapshot([0, 1, 2, 3], servers) == {0, 1}
    under_way.counted([0, 1])
    assert under_way.snapshot([0, 1, 2, 3], servers) == set()
    under_way.uploaded(0)
    assert under_way.snapshot([0, 1, 2, 3], servers) == {0}


def test_of_small_fragments_a_server_has_as_many_under_way_as_fit() -> None:
    """At the start of a run intervals are short: one at a time would leave most windows out."""
    under_way, servers = UnderWay(Room([SMALL // 3] * 3 + [SMALL])), dict.fromkeys(range(4), 0)
    assert under_way.snapshot([0, 1, 2, 3], servers) == {0, 1, 2}


def test_with_a_fragment_one_thing_is_done_at_a_time() -> None:
    """One that is to be adopted is not snapshot before that is counted, and the other way round."""
    under_way, servers = UnderWay(LARGE), {0: 0, 1: 1}
    assert under_way.adopt([0]) == {0}
    assert under_way.snapshot([0, 1], servers) == {1}
    assert under_way.adopt([0, 1]) == under_way.snapshot([0, 1], servers) == set()
    under_way.counted([0, 1])
    under_way.uploaded(1)
    assert under_way.adopt([1]) == {1}
    assert under_way.snapshot([0, 1], servers) == {0}


def test_a_fragment_goes_to_another_server_or_is_snapshot_but_not_both() -> None:
    """From the decision to snapshot it until it is uploaded it stays; while it goes it is not snapshot."""
    under_way, servers = UnderWay(LARGE), {0: 0, 1: 0}
    assert under_way.snapshot([0], servers) == {0}
    under_way.counted([0])
    assert not under_way.move(0)
    assert under_way.move(1)
    under_way.uploaded(0)
    assert under_way.snapshot([1], servers) == set()
    assert under_way.move(0)
    assert under_way.snapshot([0], servers) == set()
    under_way.moved(0)
    assert under_way.snapshot([0, 1], servers) == {0}
