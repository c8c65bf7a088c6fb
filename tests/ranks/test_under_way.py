"""What rank 0 decides to have under way, and in which order."""

from hypothesis import given
from hypothesis import strategies as st

from diloco.workers.ranks.inflight import SMALL, Room, UnderWay

LARGE = [SMALL] * 4


def test_of_small_fragments_a_server_has_as_many_under_way_as_fit() -> None:
    """At the start of a run intervals are short: one at a time would leave most windows out."""
    under_way, servers = UnderWay([SMALL // 3] * 3 + [SMALL]), dict.fromkeys(range(4), 0)
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


P = 5
SIZES = st.lists(st.sampled_from([1, SMALL // 3, SMALL]), min_size=P, max_size=P)
ROUNDS = st.lists(st.tuples(st.frozensets(st.integers(0, P - 1)), st.frozensets(st.integers(0, P - 1))), max_size=30)


@given(sizes=SIZES, servers=st.lists(st.integers(0, 1), min_size=P, max_size=P), rounds=ROUNDS)
def test_whoever_waits_longest_for_a_server_is_next(sizes, servers, rounds):
    """Whatever is due and uploaded at each step; and a server has one under way, or small ones that fit."""
    under_way, by_fragment = UnderWay(sizes), dict(enumerate(servers))
    since, there = dict[int, int](), set[int]()
    for step, (due, uploaded) in enumerate(rounds):
        for p in uploaded & there:
            under_way.uploaded(p)
        there -= uploaded
        waits = due - there
        since = {p: since.get(p, step) for p in waits}
        begun = under_way.snapshot(sorted(due), by_fragment)
        under_way.counted(begun)
        there |= begun
        for p in begun:
            assert all(since[p] <= since[q] for q in waits - begun if servers[q] == servers[p])
        since = {p: since[p] for p in waits - begun}
        for server in range(2):
            of_one = [sizes[p] for p in there if servers[p] == server]
            assert len(of_one) <= 1 or sum(of_one) <= SMALL


def test_all_that_wait_begin_at_once_where_they_fit() -> None:
    """Whatever their numbers: who waits longest asks first."""
    under_way, servers = UnderWay([SMALL // 2, SMALL // 2, SMALL]), dict.fromkeys(range(3), 0)
    assert under_way.snapshot([2], servers) == {2}
    assert under_way.snapshot([1], servers) == under_way.snapshot([0, 1], servers) == set()
    under_way.counted([2])
    under_way.uploaded(2)
    assert under_way.snapshot([0, 1], servers) == {0, 1}


def test_what_waits_no_more_is_waited_for_no_more() -> None:
    """Its window has closed, or its base was replaced: the next one does not stand behind it."""
    room = Room([SMALL, SMALL // 2, SMALL // 2])
    assert room.take(1, 0)
    assert not room.take(0, 0)
    assert not room.take(2, 0)
    assert room.in_turn([2]) == [2]
    assert room.take(2, 0)


def test_as_a_learner_leaves_snapshots_that_nobody_takes_any_more_have_no_room() -> None:
    """They were wanted at its last step; each fragment is snapshot once more, and none by a wish."""
    under_way, servers = UnderWay(LARGE), {0: 0, 1: 0, 2: 0}
    assert under_way.snapshot([0, 1], servers) == {0}
    under_way.leave()
    assert under_way.snapshot([1], servers) == set()
    assert under_way.last(2, 0)
    assert not under_way.last(0, 0)
    under_way.uploaded(2)
    assert under_way.last(0, 0)


def test_an_upload_that_goes_on_as_a_learner_leaves_keeps_its_room() -> None:
    """Else the last snapshots would come on top of it."""
    under_way = UnderWay(LARGE)
    assert under_way.snapshot([0], {0: 0}) == {0}
    under_way.counted([0])
    under_way.leave()
    assert not under_way.last(1, 0)
    assert under_way.last(2, 1)
