"""Which rank serves which fragment."""

import pytest

from diloco.workers.ranks.placement import servers_of

EQUAL = [1000] * 8
DEFAULT = [995, 995, 1041, 1041, 1002, 975, 975, 975]
"""Eight fragments as the built-in model of 54M parameters has them."""


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        (EQUAL, [1.0, 1.0, 1.125, 1.0, 1.25, 1.5, 1.75, 1.0]),
        (DEFAULT, [1.0, 1.002, 1.122, 1.008, 1.236, 1.478, 1.706, 1.041]),
    ],
)
def test_the_fullest_rank_carries_no_more_than_the_page_says(sizes: list[int], shares: list[float]) -> None:
    """With one rank to eight, over its share."""
    for ranks, share in enumerate(shares, 1):
        servers = servers_of(sizes, ranks)
        fullest = max(sum(size for size, of in zip(sizes, servers, strict=True) if of == rank) for rank in range(ranks))
        assert round(fullest * ranks / sum(sizes), 3) == share
