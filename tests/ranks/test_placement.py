"""Which elements each rank holds, and who sends what: tables and random models."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.messages.spec import TensorSpec
from diloco.workers.ranks.placement import Block, Piece, Shares, elements, in_slices, row_of, sources
from tests import HANGING_S
from tests.samples import tensor


def rows(first: int, last: int, left: int = 0, right: int = 2) -> Block:
    """Rows of two elements, or a column of them."""
    return Block(first, last, left, right)


def in_parts(table: list[TensorSpec], fragments: int) -> list[TensorSpec]:
    """Rows of every tensor in as many fragments as there are, or as it has rows."""
    found = []
    for one in table:
        cuts = np.linspace(0, one.shape[0], min(fragments, one.shape[0]) + 1).astype(int).tolist()
        for p, ends in enumerate(itertools.pairwise(cuts)):
            update = {"rows": ends if len(cuts) > 2 else None, "fragment": p if len(cuts) > 2 else one.fragment}
            found.append(one.model_copy(update=update))
    return found


def part(length: int, parts: int, number: int) -> tuple[int, int]:
    """As torch cuts a dimension: as much to each as to the first; the last ones get the rest, or nothing."""
    most = -(-length // parts)
    return min(length, most * number), min(length, most * number + most)


def sharded(layout: Layout, ranks: int, replicas: int = 1, parallel: int = 1) -> list[dict[str, Block]]:
    """As `fully_shard` gives rows to ranks; over tensor parallelism that cuts every other tensor by columns."""
    held: list[dict[str, Block]] = []
    shards = ranks // replicas // parallel
    for rank in range(ranks):
        held.append({})
        for fragment in layout.fragments:
            for slot in fragment.slots:
                (rows, row), name = (slot.tensor.shape[0], row_of(slot.tensor)), slot.tensor.name
                if name[-1] in "13579":
                    first, last = part(rows, shards, rank // parallel % shards)
                    columns = part(row, parallel, rank % parallel)
                else:
                    (begin, end), columns = part(rows, parallel, rank % parallel), (0, row)
                    first, last = (begin + at for at in part(end - begin, shards, rank // parallel % shards))
                block = Block(first, last, *columns)
                held[-1][name] = block if block.elements else Block(0, 0, 0, 0)
    return held


def test_a_vocabulary_of_257_over_three_ranks() -> None:
    """Uneven shards of the embedding, and an empty one of a bias of 2, lie where they belong."""
    layout = layout_of([tensor("embedding", (257, 4)), tensor("bias", (2,))])
    shares = Shares(layout, sharded(layout, 3))
    assert [shares.pieces(rank, 0) for rank in range(3)] == [
        (Piece(0, 0, 344, 344, 4), Piece(1028, 344, 1, 1, 1)),
        (Piece(344, 0, 344, 344, 4), Piece(1029, 344, 1, 1, 1)),
        (Piece(688, 0, 340, 340, 4),),
    ]
    local = shares.local(2).fragments[0]
    assert [(slot.tensor.name, slot.tensor.shape) for slot in local.slots] == [("embedding", (85, 4))]
    assert shares.local(2).digest == layout.digest


def test_replicas_are_sent_by_the_server_and_buffers_by_rank_0() -> None:
    """DDP: no byte goes between ranks for weights; the statistics that are the learner's are rank 0's."""
    layout = layout_of([tensor("a", (3, 2), 0), tensor("b", (2,), 1), tensor("running_mean", (2,), 2, "average")])
    shares = Shares(layout, [{"a": Block(0, 3, 0, 2), "b": rows(0, 2, 0, 1), "running_mean": rows(0, 2, 0, 1)}] * 2)
    sent = [[elements(shares.sent(rank, p)) for rank in range(2)] for p in range(3)]
    assert shares.servers == [0, 1, 1]
    assert sent == [[6, 0], [0, 2], [2, 0]]


@pytest.mark.parametrize(
    ("blocks", "first", "expected"),
    [
        ([rows(0, 6)], 0, {0}),
        ([rows(0, 6), rows(0, 6), rows(0, 6)], 1, {1}),
        ([rows(0, 4), rows(4, 6), rows(0, 0)], 2, {0, 1}),
        ([rows(0, 3), rows(3, 6), rows(0, 3), rows(3, 6)], 2, {2, 3}),
        ([rows(0, 3), rows(3, 6), rows(0, 3), rows(3, 6)], 1, {1, 2}),
        ([rows(0, 3, 0, 1), rows(0, 3, 1, 2), rows(3, 6, 0, 1), rows(3, 6, 1, 2)], 0, {0, 1, 2, 3}),
        ([rows(0, 6, 0, 1), rows(0, 6, 1, 2), rows(0, 6, 0, 1), rows(0, 6, 1, 2)], 3, {0, 3}),
        ([rows(0, 3), rows(4, 6)], 0, None),
        ([rows(0, 4), rows(3, 6)], 0, None),
        ([rows(0, 3), rows(3, 6), rows(0, 3)], 0, None),
        ([rows(0, 3), rows(3, 5)], 0, None),
        ([rows(0, 0), rows(0, 0)], 0, None),
        ([rows(0, 6, 0, 1), rows(0, 6, 0, 2)], 0, None),
        ([rows(0, 3, 0, 1), rows(0, 3, 1, 2), rows(3, 6, 0, 1)], 0, None),
        ([rows(0, 3, 0, 2), rows(2, 6, 0, 2)], 0, None),
    ],
)
def test_each_element_is_sent_once_or_the_model_is_refused(blocks, first, expected) -> None:
    """Shards, replicas and replicated shards; a gap, an overlap, and what only some hold twice are refused."""
    one = tensor("w", (6, 2))
    if expected is None:
        with pytest.raises(UsageError, match="do not hold parameter w as shards or replicas"):
            sources(blocks, one, first)
    else:
        assert sources(blocks, one, first) == expected


@settings(max_examples=200)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=8),
    fragments=st.integers(1, 3),
    shards=st.integers(1, 5),
    replicas=st.integers(1, 3),
    parallel=st.integers(1, 3),
    cut=st.booleans(),
)
def test_what_is_gathered_and_handed_out_is_the_fragment(rows, fragments, shards, replicas, parallel, cut) -> None:
    """Of any model over any number of ranks: pieces sent cover each fragment once, and come back where they were.

    Also where the rows of tensors lie in several fragments.
    """
    table = [tensor(f"t{i}", shape, i % fragments) for i, shape in enumerate(rows)]
    layout = layout_of(in_parts(table, fragments) if cut else table)
    ranks = shards * replicas * parallel
    held = sharded(layout, ranks, replicas, parallel)
    shares = Shares(layout, held)
    whole = layout.whole(np.arange(f.elements, dtype=np.float32) + 1000 * f.id for f in layout.fragments)
    for rank in range(ranks):
        for p, fragment in enumerate(shares.local(rank).fragments):
            flat = 1000 * p + np.arange(layout.fragments[p].elements, dtype=np.float32)
            wanted, here = [one.cut(flat) for one in shares.pieces(rank, p)], []
            for slot in fragment.slots:
                (first, last, left, right), values = held[rank][slot.tensor.name], whole[slot.tensor.name]
                shard = values.reshape(values.shape[0], -1)[first:last, left:right].ravel()
                assert len(shard) == slot.tensor.whole.elements
                here.append(shard[slot.within])
            assert np.array_equal(np.concatenate([*here, []]), np.concatenate([*wanted, []]))
    for p, fragment in enumerate(layout.fragments):
        flat = np.arange(fragment.elements)
        covered = np.zeros(fragment.elements, int)
        for rank in range(ranks):
            own = np.full(shares.local(rank).fragments[p].elements, -1)
            for piece in shares.pieces(rank, p):
                own[piece.at : piece.at + piece.elements] = piece.of(flat).ravel()
            assert (own >= 0).all()
            for piece in shares.sent(rank, p):
                assert piece in shares.pieces(rank, p)
                piece.of(covered)[:] += 1
        assert (covered == 1).all()


@given(sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), max_size=6), most=st.integers(1, 30))
def test_messages_between_ranks_are_bounded_and_lose_nothing(sizes, most) -> None:
    """However long and many the pieces are: each message but the last is full, but for less than a run; in order."""
    at, pieces = 0, []
    for i, (run, runs) in enumerate(sizes):
        pieces.append(Piece(1000 * i, at, run * runs, run, run + 7))
        at += run * runs
    groups = in_slices(pieces, most)
    least = most - max((run for run, runs in sizes if run <= most and runs > 1), default=1)
    assert all(least < elements(group) <= most for group in groups[:-1])
    assert elements(groups[-1]) <= most

    def places(pieces: list[Piece]) -> list[tuple[int, int]]:
        flat = np.arange(10_000)
        return [(int(start), p.at + i) for p in pieces for i, start in enumerate(p.of(flat).ravel())]

    assert places([piece for group in groups for piece in group]) == places(pieces)


FSDP_OVER_TP = """
import itertools, sys
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from diloco.workers.ranks.topology import held

distributed.init_process_group("fake", rank=int(sys.argv[1]), world_size=8, store=FakeStore())
for shape in ((4, 2), (2, 4)):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "layers"))
    for rows, columns, dim in itertools.product((50_257, 32_001, 16, 13, 9, 5, 1), (3, 8), (0, 1)):
        whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
        model = nn.Linear(columns, rows, bias=False)
        parallel = distribute_tensor(whole, mesh["layers"], [Shard(dim)], src_data_rank=None)
        model.weight = nn.Parameter(parallel)
        fully_shard(model, mesh=mesh["data"])
        first, last, left, right = held({"weight": model.weight})["weight"]
        local = model.weight.to_local().detach()
        assert torch.equal(local.reshape(-1), whole[first:last, left:right].reshape(-1)), (shape, rows, columns, dim)
        print(shape, rows, columns, dim, tuple(local.shape))
"""


def test_a_ranks_block_is_what_fsdp_over_tensor_parallelism_gives_it() -> None:
    """Rows may be uneven, as GPT-2's 50,257 are, or fewer than ranks. Each in a process: torch keeps meshes."""
    found = [
        subprocess.Popen([sys.executable, "-c", FSDP_OVER_TP, rank], stdout=subprocess.PIPE, text=True)
        for rank in ("1", "6")
    ]
    for process in found:
        shown, _ = process.communicate(timeout=HANGING_S)
        assert (process.returncode, len(shown.splitlines())) == (0, 56)


def test_a_piece_beyond_the_vector_is_refused() -> None:
    flat = np.arange(10)
    assert Piece(0, 0, 6, 2, 4).of(flat).tolist() == [[0, 1], [4, 5], [8, 9]]
    with pytest.raises(IndexError, match="elements 1 to 11 of 10"):
        Piece(1, 0, 6, 2, 4).of(flat)
