"""What ranks tell each other at each step."""

from hypothesis import given
from hypothesis import strategies as st

from diloco.workers.ranks.step_agreement import PARTS, Decisions, decode, encode


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
    decided, ranks = Decisions(over, parts / PARTS, adoptions), len(tokens)
    told = [
        encode(one, stops[rank], 7, taken[rank], decided if rank == 0 else Decisions())
        for rank, one in enumerate(tokens)
    ]
    agreed = decode([sum(column) for column in zip(*told, strict=True)], ranks)
    assert agreed.decided == decided
    assert agreed.tokens == sum(tokens)
    assert agreed.stop == any(stops[:ranks])
    assert agreed.snapshots == frozenset.intersection(*taken[:ranks])
