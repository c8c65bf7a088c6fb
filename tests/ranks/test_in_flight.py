"""What rank 0 decides to have under way, and in which order."""

from hypothesis import given
from hypothesis import strategies as st

from diloco.workers.ranks.placement import SMALL, Capacity
from diloco.workers.ranks.rank_carrier import InFlight

LARGE = [SMALL] * 4


def test_of_small_fragments_a_server_has_as_many_under_way_as_fit() -> None:
    """At the start of a run intervals are short: one at a time would leave most windows out."""
    in_flight = InFlight([SMALL // 3] * 3 + [SMALL], [0] * 4)
    assert in_flight.snapshot([0, 1, 2, 3]) == {0, 1, 2}


def test_with_a_fragment_one_thing_is_done_at_a_time() -> None:
    """One that is to be adopted is not snapshot before that is counted, and the other way round."""
    in_flight = InFlight(LARGE, [0, 1, 0, 0])
    assert in_flight.adopt([0]) == {0}
    assert in_flight.snapshot([0, 1]) == {1}
    assert in_flight.adopt([0, 1]) == in_flight.snapshot([0, 1]) == set()
    in_flight.counted([0, 1])
    in_flight.uploaded(1)
    assert in_flight.adopt([1]) == {1}
    assert in_flight.snapshot([0, 1]) == {0}


P = 5
SIZES = st.lists(st.sampled_from([1, SMALL // 3, SMALL]), min_size=P, max_size=P)
ROUNDS = st.lists(st.tuples(st.frozensets(st.integers(0, P - 1)), st.frozensets(st.integers(0, P - 1))), max_size=30)


@given(sizes=SIZES, servers=st.lists(st.integers(0, 1), min_size=P, max_size=P), rounds=ROUNDS)
def test_whoever_waits_longest_for_a_server_is_next(sizes, servers, rounds):
    """Whatever is due and uploaded at each step; and a server has one under way, or small ones that fit."""
    in_flight = InFlight(sizes, servers)
    since, there = dict[int, int](), set[int]()
    for step, (due, uploaded) in enumerate(rounds):
        for p in uploaded & there:
            in_flight.uploaded(p)
        there -= uploaded
        waits = due - there
        since = {p: since.get(p, step) for p in waits}
        begun = in_flight.snapshot(sorted(due))
        in_flight.counted(begun)
        there |= begun
        for p in begun:
            assert all(since[p] <= since[q] for q in waits - begun if servers[q] == servers[p])
        since = {p: since[p] for p in waits - begun}
        for server in range(2):
            of_one = [sizes[p] for p in there if servers[p] == server]
            assert len(of_one) <= 1 or sum(of_one) <= SMALL


def test_all_that_wait_begin_at_once_where_they_fit() -> None:
    """Whatever their numbers: who waits longest asks first."""
    in_flight = InFlight([SMALL // 2, SMALL // 2, SMALL], [0] * 3)
    assert in_flight.snapshot([2]) == {2}
    assert in_flight.snapshot([1]) == in_flight.snapshot([0, 1]) == set()
    in_flight.counted([2])
    in_flight.uploaded(2)
    assert in_flight.snapshot([0, 1]) == {0, 1}


def test_what_waits_no_more_is_waited_for_no_more() -> None:
    """Its window has closed, or its base was replaced: the next one does not stand behind it."""
    room = Capacity([SMALL, SMALL // 2, SMALL // 2], [0] * 3)
    assert room.take(1)
    assert not room.take(0)
    assert not room.take(2)
    assert room.in_turn([2]) == [2]
    assert room.take(2)


def test_as_a_learner_leaves_snapshots_that_nobody_takes_any_more_have_no_room() -> None:
    """They were wanted at its last step; each fragment is snapshot once more, and none by a wish."""
    in_flight = InFlight(LARGE, [0] * 4)
    assert in_flight.snapshot([0, 1]) == {0}
    in_flight.leave()
    assert in_flight.snapshot([1]) == set()
    assert in_flight.last(2)
    assert not in_flight.last(0)
    in_flight.uploaded(2)
    assert in_flight.last(0)


def test_an_upload_that_goes_on_as_a_learner_leaves_keeps_its_room() -> None:
    """Else the last snapshots would come on top of it."""
    in_flight = InFlight(LARGE, [0, 0, 1, 1])
    assert in_flight.snapshot([0]) == {0}
    in_flight.counted([0])
    in_flight.leave()
    assert not in_flight.last(1)
    assert in_flight.last(2)
