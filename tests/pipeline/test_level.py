"""Fragments of equal size: what is merged by rows lies in several of them, and nothing is lost or there twice."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from diloco.pipeline.fragments import LEVEL, Layout, balance, layout_of, level
from diloco.pipeline.messages.spec import TensorSpec
from tests import samples

EMBEDDING, HEAD = "embedding.weight", "head.weight"


def balanced(tensors: Sequence[TensorSpec], fragments: int) -> list[TensorSpec]:
    averaged = [tensor.name for tensor in tensors if tensor.rule == "average"]
    sizes = [(tensor.name, tensor.elements) for tensor in tensors if tensor.name not in averaged]
    chosen = balance(sizes, fragments, averaged)
    return [tensor.model_copy(update={"fragment": chosen[tensor.name]}) for tensor in tensors]


def peak(layout: Layout) -> float:
    """The largest fragment over the mean one."""
    elements = [fragment.elements for fragment in layout.trained.fragments]
    return max(elements) * len(elements) / sum(elements)


def spec_of(tensors: Sequence[TensorSpec], fragments: int) -> Any:
    return samples.spec(tensors=tuple(tensors), fragments=fragments, chunk_bytes=2**20)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[TensorSpec], int]:
    """Tensors of any shapes and rules, balanced, and the number of fragments."""
    shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
    drawn = draw(st.lists(st.tuples(shapes, st.sampled_from(["mean", "rda", "rda-row"])), min_size=1, max_size=12))
    tensors = [samples.tensor(f"t{i}", shape, rule=rule) for i, (shape, rule) in enumerate(drawn)]
    tensors = [
        tensor.model_copy(update={"matrix": draw(st.booleans())})
        if len(tensor.shape) == 2 and min(tensor.shape) > 1
        else tensor
        for tensor in tensors
    ]
    averaged = draw(st.integers(0, 2))
    tensors += [samples.tensor(f"a{i}", (3,), rule="average") for i in range(averaged)]
    fragments = draw(st.integers(1, len(drawn))) + bool(averaged)
    return balanced(tensors, fragments), fragments


@given(models(), st.booleans())
def test_every_row_of_every_tensor_is_there_once(model, headed):
    """Whatever the shapes: what is put in comes out, a spec takes the table, and no fragment grows or is empty."""
    tensors, fragments = model
    names = {tensor.name for tensor in tensors}
    table = level(tensors, names if headed else ())
    layout = layout_of(spec_of(table, fragments).tensors)
    assert [fragment.id for fragment in layout.fragments] == list(range(fragments))
    assert peak(layout) <= peak(layout_of(tensors))
    values = {t.name: np.arange(t.elements, dtype=np.float32).reshape(t.shape) for t in tensors}
    flats = [np.full(fragment.elements, np.nan, np.float32) for fragment in layout.fragments]
    for fragment, flat in zip(layout.fragments, flats, strict=True):
        for slot in fragment.slots:
            flat[slot.start : slot.stop] = values[slot.tensor.name].reshape(-1)[slot.within]
            assert math.prod(slot.shape) == slot.stop - slot.start
    found = layout.whole(flats)
    assert found.keys() == names
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)


@given(models())
def test_only_what_is_merged_by_rows_is_parted(model):
    """Norms and orthogonalised steps have whole tensors; buffers have the last fragment to themselves."""
    tensors, _ = model
    for tensor in level(tensors):
        assert tensor.rows is None or (tensor.rule in ("mean", "rda-row") and not tensor.matrix)
    assert {t for t in level(tensors) if t.rule == "average"} == {t for t in tensors if t.rule == "average"}


@given(models(), st.randoms())
def test_the_order_of_the_table_does_not_matter(model, random):
    """Two learners that list their tensors in another order find the same parts."""
    tensors, _ = model
    shuffled = random.sample(tensors, len(tensors))
    assert set(level(shuffled)) == set(level(tensors))


def transformer(
    vocab: int, width: int, layers: int, hidden: int, *, tied: bool, rule: str = "mean"
) -> list[TensorSpec]:
    """As an outer step that orthogonalises has it: keys and values of a quarter of the width."""
    one = [(width, width), (width // 4, width), (width // 4, width), (width, width), *[(hidden, width)] * 3]
    matrices = [samples.tensor(f"{n}.{i}", shape, rule=rule) for n in range(layers) for i, shape in enumerate(one)]
    norms = [samples.tensor(f"norm.{n}", (width,), rule=rule) for n in range(2 * layers)]
    head = [] if tied else [samples.tensor(HEAD, (vocab, width), rule=rule)]
    table = [tensor.model_copy(update={"matrix": True}) for tensor in matrices + head]
    return [samples.tensor(EMBEDDING, (vocab, width), rule="mean"), *table, *norms]


LARGE = {"8B, 256k": (256_000, 4096, 32, 14336), "1.3B, 128k": (128_256, 2048, 16, 8192)}


@pytest.mark.parametrize("fragments", [8, 16, 24, 48])
@pytest.mark.parametrize("rule", ["mean", "rda"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_a_large_vocabulary_makes_no_large_fragment(shape, tied, rule, fragments):
    """A tenth above the mean at most, where whole tensors make up to seven times; also with an untied head."""
    tensors = balanced(transformer(*shape, tied=tied, rule=rule), fragments)
    table = level(tensors, {HEAD})
    assert peak(layout_of(table)) <= LEVEL
    if fragments > 8:
        assert peak(layout_of(tensors)) > 1.8
    assert len(table) <= len(tensors) + 2 * fragments


def test_a_head_is_whole_and_orthogonalised_wherever_it_has_room():
    """It is parted where it must be only; then each of its rows is merged by itself."""
    tensors = transformer(*LARGE["1.3B, 128k"], tied=False, rule="rda")
    roomy, narrow = (level(balanced(tensors, fragments), {HEAD}) for fragments in (4, 16))
    (head,) = [tensor for tensor in roomy if tensor.name == HEAD]
    assert head.matrix
    assert head.rule == "rda"
    parts = [tensor for tensor in narrow if tensor.name == HEAD]
    assert len(parts) > 1
    assert {(part.matrix, part.rule) for part in parts} == {(False, "rda-row")}


def test_a_table_with_room_for_all_is_as_it_always_was():
    """So are its digest and its checkpoints: an embedding of no more than a fragment is no reason to move anything."""
    tensors = balanced([samples.tensor(f"t{i}", (30, 10)) for i in range(8)] + [samples.tensor("e", (30, 10))], 3)
    small = balanced(
        [samples.tensor(f"t{i}", (8, 7)) for i in range(5)] + [samples.tensor("e", (2, 7), rule="mean")], 4
    )
    for table in (tensors, small):
        assert level(table) == tuple(table)
    assert peak(layout_of(small)) > LEVEL


def test_a_part_says_which_rows_it_has():
    """By its name, its shape, and its place in the whole tensor; the digest tells parts of other rows apart."""
    table = tuple(
        samples.tensor("e", (10, 3), p, "mean").model_copy(update={"rows": rows})
        for p, rows in enumerate([(0, 4), (4, 10)])
    )
    first, second = (fragment.slots[0] for fragment in layout_of(table).fragments)
    assert (first.name, first.shape, first.within) == ("e[0:4]", (4, 3), slice(0, 12))
    assert (second.name, second.shape, second.within) == ("e[4:10]", (6, 3), slice(12, 30))
    other = [part.model_copy(update={"rows": rows}) for part, rows in zip(table, [(0, 5), (5, 10)], strict=True)]
    assert layout_of(table).digest != layout_of(other).digest


def part(rows: Any, fragment: int = 0, **given: Any) -> TensorSpec:
    return samples.tensor("e", (10, 3), fragment, "mean").model_copy(update={"rows": rows, **given})


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([part((0, 4)), part((5, 10), 1)], r"rows \[5, 10\) do not follow the previous part's \(it has 10\)"),
        ([part((0, 4)), part((3, 10), 1)], r"rows \[3, 10\) do not follow the previous part's"),
        ([part((4, 10)), part((0, 4), 1)], r"rows \[4, 10\) do not follow the previous part's"),
        ([part((0, 4)), part((4, 11), 1)], r"rows \[4, 11\) do not follow the previous part's"),
        ([part((0, 4)), part((4, 4)), part((4, 10), 1)], r"rows \[4, 4\) do not follow the previous part's"),
        ([part((0, 4)), part((4, 9), 1)], "its parts end at 9"),
        ([part((0, 4), rule="rda"), part((4, 10), 1, rule="rda")], "not merged by rows"),
        ([part((0, 4), matrix=True), part((4, 10), 1, matrix=True)], "not merged by rows"),
        ([part((0, 4)), part((4, 10), 1, dtype="bfloat16")], "or its parts disagree"),
        ([part((0, 4)), part((4, 10), 1, shape=(10, 4))], "or its parts disagree"),
        ([part((0, 4)), part((4, 10), 1), part(None)], "same name"),
        ([part((0, 4), shape=()), part((4, 10), 1)], "not merged by rows"),
    ],
)
def test_a_spec_whose_parts_are_no_whole_tensor_is_refused(parts, told):
    """A spec is a peer's word: rows that nobody has, or two have, would be trained in vain."""
    with pytest.raises(ValidationError, match=told):
        spec_of(parts, 2)
