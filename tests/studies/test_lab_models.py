"""The lab's further models, the mixture of experts and the small ViT, and its further optimizer."""

import numpy as np
import pytest
import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import SyncSettings
from diloco.workers.parameters import tensor_table
from diloco.workers.trainer.models.sizes import SIZES, Size
from diloco_studies.quality.inner import inner_optimizers
from diloco_studies.quality.models import vit
from diloco_studies.quality.models.moe import Mixture, MixtureGPT, build_mixture
from diloco_studies.quality.models.vit import Images, build_vit
from diloco_studies.quality.settings import VIT_SIZES, LabRun
from diloco_studies.quality.tasks.digits import Digits
from diloco_studies.quality.tasks.tasks import open_task

SMALL = Size(layers=2, width=32, heads=2, hidden=64)


def test_a_mixture_is_its_chosen_experts_weighted_by_their_probabilities():
    """Token by token, the plain way."""
    torch.manual_seed(0)
    mixture = Mixture(8, 16, experts=4, chosen=2)
    h = torch.randn(2, 3, 8)
    out = mixture(h)
    for b in range(2):
        for t in range(3):
            shares = mixture.router(h[b, t]).softmax(-1)
            best = shares.argsort(descending=True)[:2]
            parts = [shares[e] / shares[best].sum() * mixture.experts[e](h[b, t][None])[0] for e in best]
            assert torch.allclose(out[b, t], sum(parts), atol=1e-6)


def test_the_balancing_loss_is_one_for_even_use_and_higher_for_uneven():
    """And its gradient moves the router towards even use."""
    mixture = Mixture(4, 8, experts=4, chosen=1)
    with torch.no_grad():
        mixture.router.weight.copy_(10 * torch.eye(4))
    mixture(torch.eye(4)[None])
    assert mixture.balance.item() == pytest.approx(1.0, abs=1e-3)
    mixture(torch.eye(4)[None, [0, 0, 0, 0]])
    assert mixture.balance.item() == pytest.approx(4.0, abs=1e-2)
    with torch.no_grad():
        mixture.router.weight.copy_(torch.eye(4))
    mixture(torch.eye(4)[None, [0, 0, 0, 1]])
    mixture.balance.backward()
    assert mixture.router.weight.grad[0, 0] > 0


def test_a_token_costs_what_it_costs_in_the_dense_model():
    """Activated parameters of the MLPs: k experts of 1/k of the width, and a router."""
    dense, mixed = SIZES["tiny"], build_mixture("tiny", 0, experts=8, chosen=2)
    block = mixed.blocks[0]
    one = sum(p.numel() for p in block.mixture.experts[0].parameters())
    assert 2 * one == 3 * dense.width * dense.hidden
    assert len(mixed.blocks) == dense.layers
    assert not hasattr(block, "gate")


def test_all_of_a_mixture_is_trained_and_the_same_seed_gives_the_same_model():
    """Every parameter has a gradient from the two losses; every tensor was initialised by the seed."""
    model = MixtureGPT(SMALL, 256, 1, experts=4, chosen=2)
    twin, other = (MixtureGPT(SMALL, 256, seed, experts=4, chosen=2) for seed in (1, 2))
    pairs = zip(model.parameters(), twin.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in pairs)
    logits = model(torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(0)))
    (logits.square().mean() + model.balance).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert 1.0 <= model.balance.item() < 4.0


@pytest.mark.parametrize(("name", "experts", "chosen"), [("none", 8, 2), ("tiny", 2, 4), ("tiny", 8, 3)])
def test_a_mixture_that_cannot_be_is_refused(name, experts, chosen):
    """No such size, more chosen than there are, a width that cannot be shared."""
    with pytest.raises(UsageError):
        build_mixture(name, 0, experts, chosen)


def test_the_text_task_adds_the_balancing_loss_for_training_only(tmp_path):
    """What is measured on held-out text is the text's own loss."""
    (tmp_path / "text").write_text("".join(f"{n} and {n}\n" for n in range(2000)))
    told = {"data": str(tmp_path / "text"), "experts": 4, "seq_len": 16, "eval_tokens": 64}
    task, heavy = (open_task(LabRun(balance=weight, **told), torch.device("cpu")) for weight in (0.0, 1.0))
    model = task.build()
    batch = task.batch([(0, 0), (0, 1)])
    assert heavy.loss(model, batch).item() - task.loss(model, batch).item() == pytest.approx(model.balance.item(), 1e-4)
    assert task.evaluate(model) == heavy.evaluate(model)


def test_a_vit_sees_all_of_an_image_and_where_it_is():
    """Each pixel changes the logits, also through patches that come before it; moved pixels are another image."""
    model = build_vit("tiny", Images(side=8, channels=1, patch=2, classes=10), seed=0)
    pixels = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    logits = model(pixels)
    assert logits.shape == (1, 10)
    logits.square().sum().backward()
    assert (pixels.grad != 0).all()
    assert not torch.allclose(model(pixels.roll(2, -1)), logits)
    assert {p.fragment for p in tensor_table(model, SyncSettings(fragments=8))} == set(range(8))
    with pytest.raises(UsageError):
        build_vit("huge", model.images, 0)


def test_digits_held_out_are_never_trained_on():
    """No training image is a held-out one; epochs differ in order and by up to a pixel; the same seed repeats them."""
    pytest.importorskip("sklearn")
    task = open_task(LabRun(task="digits"), torch.device("cpu"))
    everything = [(0, index) for index in range(task.examples)]
    images, classes = task.batch(everything)
    pictures = Digits()
    held_out = {pictures.held_out(index).tobytes() for index in range(360)}
    assert (len(images), len(pictures.held_out_classes)) == (1437, 360)
    assert torch.equal(images, open_task(LabRun(task="digits"), torch.device("cpu")).batch(everything)[0])
    assert not torch.equal(images, task.batch([(1, index) for index in range(task.examples)])[0])
    assert not held_out & {pictures.train(index).tobytes() for index in range(task.examples)}
    assert np.bincount(classes, minlength=10).min() > 100
    assert 0 <= images.min() < images.max() <= 1


def test_the_sizes_that_a_file_may_name_are_those_that_are_built():
    """Of the ViT, which a file is read without."""
    assert tuple(vit.SIZES) == VIT_SIZES


def test_a_loss_is_said_a_byte_of_text_and_a_token_of_tokens(tmp_path):
    """And a model has an entry for each token."""
    np.save(tmp_path / "tokens.npy", np.arange(20_000, dtype=np.uint16) % 1000)
    (tmp_path / "text.txt").write_text("A text. " * 1000)
    runs = [LabRun(model="nano", data=str(tmp_path / name)) for name in ("tokens.npy", "text.txt")]
    tokens, text = (open_task(run, torch.device("cpu")) for run in runs)
    assert (text.measure, tokens.measure) == ("held-out loss (nats a byte)", "held-out loss (nats a token)")
    assert tokens.build()(torch.tensor([[999]])).shape == (1, 1, 1024)


@pytest.mark.parametrize("tied", [False, True])
def test_muon_is_for_hidden_matrices(tied: bool) -> None:
    """Embedding, output head and vectors have AdamW, and a column or a row of its own is no matrix."""
    layers: list[nn.Module] = [nn.Embedding(50, 8), nn.Linear(8, 4), nn.Linear(4, 1), nn.Linear(1, 8)]
    layers += [nn.Linear(8, 50, bias=False)]
    if tied:
        layers[-1].weight = layers[0].weight
    muon, adamw = inner_optimizers(nn.Sequential(*layers), LabRun(optimizer="muon"))
    shapes = [sorted(tuple(p.shape) for g in one.param_groups for p in g["params"]) for one in (muon, adamw)]
    assert isinstance(muon, torch.optim.Muon)
    assert shapes == [[(4, 8)], sorted([(50, 8)] * (1 if tied else 2) + [(4,), (1, 4), (1,), (8, 1), (8,)])]
