"""The layout: every tensor once, balanced, and the same for everybody."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import balance, fragments_of, layout_of
from tests import samples

tables = st.dictionaries(st.text(min_size=1, max_size=8), st.integers(1, 10**6), min_size=1, max_size=40)


@given(tables, st.data())
def test_every_tensor_is_in_exactly_one_fragment_and_no_fragment_is_empty(sizes, data):
    """A partition into exactly P parts, whatever the sizes."""
    fragments = data.draw(st.integers(1, len(sizes)))
    chosen = balance(sizes.items(), fragments)
    assert chosen.keys() == sizes.keys()
    assert set(chosen.values()) == set(range(fragments))


@given(tables, st.data())
def test_the_largest_fragment_keeps_its_bound(sizes, data):
    """The greedy promise: the peak is at most the mean plus (1 - 1/P) of the peak's smallest tensor."""
    fragments = data.draw(st.integers(1, len(sizes)))
    chosen = balance(sizes.items(), fragments)
    load = [0] * fragments
    for name, p in chosen.items():
        load[p] += sizes[name]
    # Largest first: the peak's smallest tensor came last, when its fragment was the smallest of all.
    last = min(size for name, size in sizes.items() if load[chosen[name]] == max(load))
    assert max(load) <= sum(load) / fragments + last * (1 - 1 / fragments) + 1e-6


@given(tables, st.data())
def test_average_only_tensors_are_alone_in_the_last_fragment(sizes, data):
    """The others are spread over those before, as a model without would be; and a layout can leave them out again."""
    averaged = [f"/{i}" for i in range(data.draw(st.integers(1, 3)))]
    fragments = data.draw(st.integers(2, len(sizes) + 1))
    chosen = balance(sizes.items(), fragments, averaged)
    assert {name for name, p in chosen.items() if p == fragments - 1} == set(averaged)
    assert {name: chosen[name] for name in sizes} == balance(sizes.items(), fragments - 1)
    assert fragments_of(24, len(sizes), len(averaged)) == min(24, len(sizes) + 1)
    assert fragments_of(1, len(sizes), len(averaged)) == 2
    rules = {name: "average" if name in averaged else "rda" for name in chosen}
    table = [samples.tensor(name, (3,), p, rules[name]) for name, p in chosen.items()]
    whole, plain = layout_of(table), layout_of([tensor for tensor in table if tensor.rule == "rda"])
    assert whole.trained.fragments == plain.fragments
    assert whole.trained.digest == whole.digest != plain.digest


@given(tables, st.data())
def test_the_order_of_the_table_does_not_matter(sizes, data):
    """Two learners that list their tensors in another order find the same assignment."""
    fragments = data.draw(st.integers(1, len(sizes)))
    shuffled = data.draw(st.permutations(list(sizes.items())))
    assert balance(shuffled, fragments) == balance(sizes.items(), fragments)


def test_too_many_fragments_are_refused_with_the_numbers():
    """The message names the setting, its value and the bound."""
    with pytest.raises(UsageError, match=r"fragments=3.*2 trained tensors.*fragments=2"):
        balance([("a", 1), ("b", 1)], 3)


def test_slots_follow_the_table_without_gaps():
    """Within a fragment tensors lie end to end, in the table's order."""
    table = [samples.tensor("a", (2, 3), 1), samples.tensor("b", (4,), 0), samples.tensor("c", (), 1)]
    layout = layout_of(table)
    assert [fragment.id for fragment in layout.fragments] == [0, 1]
    assert [(s.tensor.name, s.start, s.stop) for s in layout.fragments[1].slots] == [("a", 0, 6), ("c", 6, 7)]
    assert [fragment.elements for fragment in layout.fragments] == [4, 7]
    assert layout.elements == 11


def test_the_digest_tells_layouts_apart():
    """Any difference in what a table says is seen, its order too; equal tables have equal digests."""
    table = (samples.tensor("a", (2, 3)), samples.tensor("b", (6,), 1))
    changed = [
        (table[0].model_copy(update={"name": "x"}), table[1]),
        (table[0].model_copy(update={"shape": (3, 2)}), table[1]),
        (table[0].model_copy(update={"dtype": "bfloat16"}), table[1]),
        (table[0].model_copy(update={"rule": "mean"}), table[1]),
        (table[0].model_copy(update={"matrix": True}), table[1]),
        (table[0].model_copy(update={"fragment": 1}), table[1].model_copy(update={"fragment": 0})),
        (table[1], table[0]),
    ]
    digests = {layout_of(t).digest for t in (table, *changed)}
    assert len(digests) == 1 + len(changed)
    assert layout_of(list(table)).digest == layout_of(table).digest


@pytest.mark.parametrize("shape", [(6,), (6, 1), (1, 6), (2, 3, 2), ()])
def test_a_spec_whose_matrix_has_no_rows_and_columns_is_refused(shape):
    """A spec is a peer's word: its owner would fail at every merge."""
    tensors = (samples.tensor("a", shape).model_copy(update={"matrix": True}), samples.tensor("b", (4,), 1))
    with pytest.raises(ValidationError, match="must have rows and columns"):
        samples.spec(tensors=tensors)
