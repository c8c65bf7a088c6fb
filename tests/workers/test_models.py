"""Promises about the built-in model."""

import math

import pytest
import torch

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import TrainerSettings
from diloco.workers.trainer.models.gpt import GPT, build, rotary_table, rotate
from diloco.workers.trainer.models.sizes import SIZES, Size, size_table
from diloco.workers.trainer.recipe import loss_of
from diloco.workers.trainer.sample import Loaded, generate, sample

SMALL = Size(layers=2, width=32, heads=2, hidden=48)


def blocks(count: int = 4, tokens: int = 17) -> torch.Tensor:
    return torch.randint(0, 256, (count, tokens), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", SIZES)
def test_the_size_table_tells_the_truth(name: str) -> None:
    """The count shown to people is the count of the model; on the meta device, where that takes no memory."""
    with torch.device("meta"):
        model = GPT(SIZES[name], 256, 0)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name].parameters()
    assert len(list(model.parameters())) == SIZES[name].tensors


def test_sizes_span_under_1m_to_about_1b() -> None:
    counts = {name: size.parameters() for name, size in SIZES.items()}
    assert list(counts.values()) == sorted(counts.values())
    assert next(iter(counts.values())) < 1e6
    assert (counts["124m"], counts["350m"], counts["1b"]) == (123_920_384, 349_552_640, 996_671_488)


def test_an_unknown_size_names_the_known_ones() -> None:
    """So does the help, which is written where torch is not imported."""
    with pytest.raises(UsageError, match=r"'huge'.*tiny \(0\.9M\)"):
        build("huge", 0)
    assert size_table() in str(TrainerSettings.model_fields["model"].description)


def test_the_seed_alone_decides_the_parameters() -> None:
    """Same seed, same model, whatever torch's global generator did; another seed, another model."""
    first = GPT(SMALL, 256, 7)
    torch.rand(5)
    second, other = GPT(SMALL, 256, 7), GPT(SMALL, 256, 8)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_an_untrained_model_knows_nothing() -> None:
    """The loss at the start is that of a uniform guess, or nearly."""
    assert loss_of(GPT(SMALL, 256, 0), blocks()).item() == pytest.approx(math.log(256), abs=0.1)


def test_no_token_sees_a_later_one() -> None:
    """Changing token t changes no logits before t, and does change those from t on."""
    model, tokens = GPT(SMALL, 256, 0), blocks(1, 12)
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_rotation_makes_attention_depend_on_distance_only() -> None:
    """The product of a rotated query and key is the same wherever the pair stands."""
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    table = rotary_table(10, 8, torch.device("cpu"))
    queries = rotate(q.expand(1, 10, 1, 8), table)[0, :, 0]
    keys = rotate(k.expand(1, 10, 1, 8), table)[0, :, 0]
    products = queries @ keys.T
    torch.testing.assert_close(products[3, 1], products[9, 7])
    assert abs(products[3, 1] - products[3, 2]) > 1e-3


def test_there_is_no_bias_anywhere() -> None:
    assert all(tensor.dim() == 2 for tensor in GPT(SMALL, 256, 0).parameters())


def test_generation_is_seeded_and_keeps_its_prompt() -> None:
    model, prompt = GPT(SMALL, 256, 0), torch.tensor([1, 2, 3])
    first, again, other = (generate(model, prompt, 20, 8, 1.0, 50, seed) for seed in (0, 0, 1))
    assert first.tolist()[:3] == [1, 2, 3]
    assert len(first) == 23
    assert first.tolist() == again.tolist() != other.tolist()


def test_a_model_that_a_gpu_has_no_room_for_is_sampled_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is taken where there is one; others may hold its memory."""
    tried = []

    class Large(GPT):
        def to(self, device: torch.device) -> "Large":  # type: ignore[override]
            tried.append(device.type)
            if device.type == "cuda":
                raise torch.OutOfMemoryError
            return self

    monkeypatch.setattr("diloco.workers.trainer.sample.choose_device", lambda name: torch.device("cuda"))
    loaded = Loaded(Large(SMALL, 256, 0), {"seq_len": 8})
    assert sample(loaded, "a", 3, 0.0, 0, 0).startswith("a")
    assert tried == ["cuda", "cpu"]


def test_temperature_0_and_top_1_take_the_likeliest_token() -> None:
    model, prompt = GPT(SMALL, 256, 0), torch.tensor([1, 2, 3])
    likeliest = model(prompt[None])[0, -1].argmax().item()
    assert generate(model, prompt, 1, 8, 0.0, 0, 0)[-1].item() == likeliest
    assert generate(model, prompt, 1, 8, 1.0, 1, 0)[-1].item() == likeliest
