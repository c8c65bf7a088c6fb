"""Other packings of a model into fragments: the same tensors, each in one fragment, and no fragment empty."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.pipeline.messages.spec import TensorSpec
from diloco_studies.quality.fragment import packed


def table(sizes: list[int]) -> list[TensorSpec]:
    return [
        TensorSpec(name=f"t{n}", shape=(size,), dtype="float32", rule="mean", fragment=0)
        for n, size in enumerate(sizes)
    ]


def fragments(sizes: list[int], count: int, packing: str) -> list[int]:
    return [tensor.fragment for tensor in packed(table(sizes), count, packing)]


def test_neighbours_are_together_or_apart():
    assert fragments([10, 10, 10, 10], 2, "contiguous") == [0, 0, 1, 1]
    assert fragments([10, 10, 10, 10], 2, "strided") == [0, 1, 0, 1]
    assert fragments([90, 5, 5], 2, "contiguous") == [0, 1, 1]
    assert fragments([5, 5, 90], 3, "contiguous") == [0, 1, 2]


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    st.integers(1, 40),
    st.sampled_from(["contiguous", "strided"]),
)
def test_no_fragment_is_empty_and_neighbours_stay_in_order(sizes: list[int], count: int, packing: str):
    count = min(count, len(sizes))
    found = fragments(sizes, count, packing)
    assert set(found) == set(range(count))
    if packing == "contiguous":
        assert found == sorted(found)


@pytest.mark.parametrize("packing", ["contiguous", "strided"])
def test_all_else_of_a_tensor_is_as_it_was(packing: str):
    before = table([3, 4, 5])
    for old, new in zip(before, packed(before, 2, packing), strict=True):
        assert new.model_copy(update={"fragment": 0}) == old
