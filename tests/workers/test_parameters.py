"""Promises about the way between a model's tensors and the flat vectors that travel."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.payload import buffers
from diloco.pipeline.settings import SyncSettings
from diloco.workers.parameters import FragmentParameters, described, tensor_table


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.table(x)))
        return out


def fragments_of(model: nn.Module, count: int = 2, device: str = "cpu") -> FragmentParameters:
    return FragmentParameters(model.to(device), layout_of(tensor_table(model, SyncSettings(fragments=count))))


@pytest.mark.parametrize(
    ("merge", "vector", "matrix"), [("mean", "mean", "mean"), ("rda", "rda", "rda"), ("rda-row", "rda", "rda-row")]
)
def test_the_table_lists_each_trained_tensor_once_with_its_rule(merge: Any, vector: str, matrix: str) -> None:
    """Embeddings merge by mean, the rest as asked; a vector has no rows, and frozen tensors do not travel."""
    rules = {t.name: t.rule for t in tensor_table(Net(), SyncSettings(fragments=2, merge=merge))}
    assert rules == {"table.weight": "mean", "body.weight": matrix, "body.bias": vector, "head.weight": matrix}


def test_a_tied_head_is_its_embedding() -> None:
    """A tied tensor is listed once and merges by mean."""
    table = described(Net(tied=True)).whole_tensors(SyncSettings(fragments=2))
    assert [(t.name, t.rule) for t in table if t.elements == 28] == [("table.weight", "mean")]


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_matrices_of_an_orthogonalised_outer_step_are_no_embeddings_and_no_vectors(merge: str) -> None:
    """Whatever the merge rule; with Nesterov's none is said to be one, so that tables stay as they were."""
    told = tensor_table(Net(), SyncSettings(fragments=2, merge=merge, outer="halley"))
    assert {t.name for t in told if t.matrix} == {"body.weight", "head.weight"}
    assert not any(t.matrix for t in tensor_table(Net(), SyncSettings(fragments=2, merge=merge, outer="nesterov")))
    assert not any(t.matrix for t in tensor_table(nn.Linear(9, 1), SyncSettings(fragments=1, outer="halley")))


def test_an_orthogonalised_outer_step_without_momentum_is_refused() -> None:
    with pytest.raises(UsageError, match="momentum above 0"):
        tensor_table(Net(), SyncSettings(fragments=2, outer="halley", outer_momentum=0))


def test_a_snapshot_keeps_its_moment() -> None:
    """Training on after a snapshot does not change it."""
    model = Net()
    taken = fragments_of(model, 1).snapshot(0)
    before = taken.numpy().copy()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(1.0)
    assert taken.ready()
    np.testing.assert_array_equal(taken.numpy(), before)


def test_overwriting_keeps_what_was_read_and_the_moments() -> None:
    """The source vector is not aliased, and Adam's moments are untouched."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    kept = [moment.clone() for moment in moments]
    fragments = fragments_of(model, 1)
    flat = np.zeros_like(fragments.snapshot(0).numpy())
    fragments.overwrite(0, flat)
    assert all(torch.equal(moment, before) for moment, before in zip(moments, kept, strict=True))
    optimizer.step()
    assert model.body.weight.any()
    assert not flat.any()


def test_snapshots_go_round_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any precision: fresh memory costs several times as much as the copy."""
    monkeypatch.setattr(buffers, "_buffers", buffers.Buffers())  # in the process's own, earlier tests left theirs
    for dtype in (torch.float32, torch.bfloat16):
        parameters = fragments_of(nn.Linear(1024, 1024).to(dtype), count=1)
        found = set()
        for _ in range(4):
            found.add(parameters.snapshot(0).numpy().__array_interface__["data"][0])
        assert len(found) == 1


class Words(nn.Module):
    """Mostly an embedding; its head is another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(101, 4), nn.Linear(4, 4), nn.Linear(4, 101, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.table(x)))
        return out


class TiedWords(Words):
    """Its head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.01 * super().forward(x)  # SGD must not diverge


def test_a_large_embedding_and_its_head_are_in_parts() -> None:
    """An untied head as large is no longer orthogonalised as a whole."""
    table = tensor_table(Words(), SyncSettings(fragments=3, merge="rda"))
    assert {t.name: t.rule for t in table if t.rows} == {"table.weight": "mean", "head.weight": "rda-row"}
    assert {t.name for t in table if t.matrix} == {"body.weight"}


@pytest.mark.parametrize("turned", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_copied_out_of_the_whole_tensor_and_into_it(dtype: torch.dtype, turned: bool) -> None:
    """Each fragment has its rows, and changes no other; put together they are the model."""
    torch.manual_seed(1)
    source, target = Words().to(dtype), Words().to(dtype)
    if turned:
        source.table.weight.data = source.table.weight.data.t().contiguous().t()
    layout = layout_of(tensor_table(source, SyncSettings(fragments=3)))
    outgoing, incoming = FragmentParameters(source, layout), FragmentParameters(target, layout)
    flats = [outgoing.snapshot(p).numpy() for p in range(3)]
    for name, value in layout.whole(flats).items():
        assert torch.equal(torch.from_numpy(value), dict(source.named_parameters())[name].float())
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(7.0)
    place = target.table.weight.data_ptr()
    for p in range(3):
        untouched = [incoming.snapshot(other).numpy().copy() for other in range(p + 1, 3)]
        assert all((flat == 7.0).all() for flat in untouched)
        incoming.overwrite(p, flats[p])
        assert torch.equal(incoming.on_device(p)(), torch.from_numpy(flats[p]))
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert target.table.weight.data_ptr() == place


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_snapshot_is_not_torn_by_the_next_step() -> None:
    """Values come through pinned memory as they were, though training went on at once."""
    model = nn.Linear(2048, 2048)
    fragments = fragments_of(model, 1, "cuda")
    for round_ in range(20):
        with torch.no_grad():
            model.weight.fill_(float(round_))
            model.bias.fill_(float(round_))
            taken = fragments.snapshot(0)
            model.weight.fill_(-1.0)
        flat = taken.numpy()
        assert flat.min() == flat.max() == float(round_)
        fragments.overwrite(0, flat + 0.5)
        assert model.weight.min().item() == model.weight.max().item() == round_ + 0.5
