"""Replicas that are not trained alike are found."""

from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.settings import SyncSettings
from diloco.workers.parameters import FragmentParameters, FragmentTensors, tensor_table
from diloco.workers.ranks.gather import ELEMENTS, EVERY, Samples, differing, sample_layout
from diloco.workers.ranks.placement import SLICE, Block, Shares, whole_block
from tests import samples
from tests.ranks.party import Party


def two(model: nn.Module, fragments: int = 2) -> Shares:
    """Two ranks that hold all of it."""
    layout = layout_of(tensor_table(model, SyncSettings(fragments=fragments)))
    whole = {slot.tensor.name: whole_block(slot.tensor) for f in layout.fragments for slot in f.slots}
    return Shares(layout, [whole, whole])


def test_some_rows_of_what_all_hold_are_compared() -> None:
    """As they are at a step, and few of them; of shards nothing is."""
    model = nn.Sequential(nn.Embedding(1000, 64), *(nn.Linear(64, 64) for _ in range(9)))
    layout = sample_layout(two(model))
    assert layout is not None
    (fragment,) = layout.fragments
    assert 1 < len(fragment.slots) <= 10
    assert fragment.elements <= ELEMENTS
    parameters = FragmentParameters(model, layout_of(tensor_table(model, SyncSettings(fragments=2))))
    taken = parameters.some(layout).snapshot(0).numpy()
    state = model.state_dict()
    for slot in fragment.slots:
        rows = slice(None) if slot.tensor.rows is None else slice(*slot.tensor.rows)
        np.testing.assert_array_equal(taken[slot.start : slot.stop], state[slot.tensor.name][rows].numpy().ravel())
    tensor = samples.tensor("t", (4,), rule="mean")
    assert sample_layout(Shares(layout_of((tensor,)), [{"t": Block(0, 2, 0, 1)}, {"t": Block(2, 4, 0, 1)}])) is None


def test_two_samples_fit_into_one_message() -> None:
    """However large the model is."""
    for sizes in [(1, 1), (40, 7), (600, 2000)]:
        layout = sample_layout(two(nn.Linear(*sizes)))
        assert layout is None or 2 * layout.elements <= SLICE


def test_it_is_looked_at_first_and_then_seldom() -> None:
    """At the first step, then after twice as many, and so on."""
    model = nn.Linear(64, 64)
    layout = sample_layout(two(model))
    assert layout is not None
    samples = Samples(FragmentParameters(model, two(model).layout), layout)
    looks = []
    for step in range(4 * EVERY + 1):
        with torch.no_grad():
            model.weight.fill_(step)
            model.bias.fill_(step)
        if (both := samples.stepped(step)) is not None:
            before, now = both
            assert before.numpy()[0] == step - 1
            assert now.numpy()[0] == step
            looks.append(step)
    assert looks == [2**n for n in range(11)] + [2 * EVERY, 3 * EVERY, 4 * EVERY]


def test_what_cannot_be_looked_at_ends_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and not looked at again."""
    model, asked = nn.Linear(64, 64), list[int]()
    layout = sample_layout(two(model))
    assert layout is not None

    def fails(_: object, p: int) -> None:
        asked.append(p)
        raise torch.OutOfMemoryError("no memory")

    samples = Samples(FragmentParameters(model, two(model).layout), layout)
    monkeypatch.setattr(FragmentTensors, "snapshot", fails)
    with capture_logs() as log:
        assert [samples.stepped(step) for step in range(9)] == [None] * 9
    assert asked == [0]
    assert [(line["event"], line["error"]) for line in log] == [("replicas_not_compared", "no memory")]


def test_what_rounding_does_is_no_difference() -> None:
    """Nor values that stand still together; a step of another batch is one, and so is what stands still differing."""
    rng = np.random.default_rng(0)
    before = rng.standard_normal(100).astype(np.float32)
    one, other = (before + 1e-3 * rng.standard_normal(100).astype(np.float32) for _ in range(2))
    first = np.stack([before, one])
    assert differing({0: first, 1: first * np.float32(1 + 1e-7)}) == []
    assert differing({0: np.stack([one, one]), 1: np.stack([one, one])}) == []
    assert differing({0: first, 1: np.stack([before, other]), 2: first}) == [1]
    assert differing({0: np.stack([one, one]), 1: np.stack([other, other])}) == [1]


@pytest.mark.redis
@pytest.mark.slow
def test_a_loop_that_does_not_average_gradients_is_told_so(tmp_path: Path) -> None:
    """At its first step, once; one that does, and DDP, hear nothing."""
    with Party(tmp_path, sync_interval=6, fragments=4, tokens=8_000) as party:
        kinds = "apart", "mean", "ddp"
        assert party.ended(*(rank for kind in kinds for rank in party.learner(kind, kind, 2))) == [0] * 6
        (told,) = party.said("apart-0", "replicas_apart")
        assert '"steps": 1' in told
        assert '"ranks": [0, 1]' in told
        assert "average every gradient" in told
        assert not any(party.said(f"{kind}-{rank}", "replicas_apart") for kind in kinds[1:] for rank in range(2))
