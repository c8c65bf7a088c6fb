"""Promises of the rule by which syncers share fragments."""

from hypothesis import given
from hypothesis import strategies as st

from diloco.syncer.serving.sharing import excess, quota, wanted

COUNTS = {"syncers": st.integers(1, 40), "fragments": st.integers(1, 200)}


@given(**COUNTS)
def test_quotas_cover_every_fragment_once_and_differ_by_one_at_most(syncers: int, fragments: int) -> None:
    quotas = [quota(rank, syncers, fragments) for rank in range(syncers)]
    assert sum(quotas) == fragments
    assert max(quotas) - min(quotas) <= 1


def test_a_joiner_takes_from_each_and_the_lead_stays() -> None:
    assert excess({0, 1, 2}, 0, 3, 6) == [2]
    assert excess({3, 4, 5}, 1, 3, 6) == [5]
    assert wanted((), (2, 5), 2, 3, 6) == [2, 5]
    assert excess({0, 7}, 1, 2, 2) == [7]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=60),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_from_any_start_the_sharing_settles_and_only_the_excess_moves(
    owners: list[int], syncers: int, random: object
) -> None:
    """Whoever holds what, in whatever order the syncers act: soon all have their quota, and then nothing moves."""
    fragments = len(owners)
    held = {rank: {p for p, owner in enumerate(owners) if owner == rank} for rank in range(syncers)}
    before = {rank: set(mine) for rank, mine in held.items()}
    for _ in range(2):
        ranks = list(range(syncers))
        random.shuffle(ranks)  # type: ignore[attr-defined]
        for rank in ranks:
            held[rank] -= set(excess(held[rank], rank, syncers, fragments))
            free = [p for p in range(fragments) if not any(p in mine for mine in held.values())]
            held[rank] |= set(wanted(held[rank], free, rank, syncers, fragments))
    assert [len(held[rank]) for rank in range(syncers)] == [quota(rank, syncers, fragments) for rank in range(syncers)]
    assert sorted(p for mine in held.values() for p in mine) == list(range(fragments))
    for rank, mine in before.items():
        kept = min(len(mine), quota(rank, syncers, fragments))
        assert len(mine & held[rank]) >= kept
