"""Promises about models of transformers in the built-in trainer: `--model hf:...`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog.testing
import torch
from torch import nn

from diloco.cli import main
from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.settings import EvaluatorProcess, LearnerProcess, LearnerSettings, SyncSettings, load
from diloco.workers.parameters import tensor_table
from diloco.workers.times import LearnerTimes
from diloco.workers.trainer import optional, trainer
from diloco.workers.trainer.data import tokenized
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.data.token_shards import read_index
from diloco.workers.trainer.data.tokenized import open_for
from diloco.workers.trainer.evaluator_process import built_in
from diloco.workers.trainer.models import hf, hf_config
from diloco.workers.trainer.models.hf import build_hf, weights_digest
from diloco.workers.trainer.models.hf_config import check_same, read_hf
from diloco.workers.trainer.models.named import build_model, check_model, model_of
from diloco.workers.trainer.precision import training_forward
from diloco.workers.trainer.recipe import add_gradients, forward_of, held_out_loss, loss_of, trainer_spec
from diloco.workers.trainer.together import Ranks
from diloco.workers.trainer.trainer import follow
from tests.workers.test_hf_checks import tokenizer

CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 2},
}
OTHERS: list[dict[str, Any]] = [
    {
        **{"model_type": "gpt2", "vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
        **{"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    },
    {
        **{"model_type": "qwen3", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        **{"max_position_embeddings": 64, "tie_word_embeddings": False},
    },
    {
        **{"model_type": "mixtral", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2},
        **{"max_position_embeddings": 64},
    },
]
KINDS = [CONFIG, *OTHERS]


def named(config: dict[str, Any]) -> hf_config.HfModel:
    found = read_hf("hf:" + json.dumps(config))
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its weights."""
    path = tmp_path / "model"
    model: Any = build_hf(named(CONFIG), 7)
    model.save_pretrained(path)
    return path


# What a name names: without transformers.


def test_a_folder_a_file_and_the_spec_name_the_same_model(tmp_path: Path) -> None:
    """Whatever says where it lies, how its numbers were stored, or which code to fetch is no part of what is agreed
    on, at any depth: a spec comes from others, and may name code of the hub."""
    noise = {
        **{"_name_or_path": "/home/me", "transformers_version": "5", "dtype": "bfloat16", "architectures": ["X"]},
        **{
            "_attn_implementation": "evil/kernels",
            "attn_implementation": "evil/kernels",
            "auto_map": {"A": "evil--x.y"},
        },
        **{"text_config": {"attn_implementation": "evil/kernels", "hidden_size": 3}},
        **{"parts": [{"attn_implementation": "evil/kernels", "width": 3}, [{"auto_map": {"A": "evil--x.y"}}], 7]},
    }
    (tmp_path / "config.json").write_text(json.dumps(noise | CONFIG, indent=4))
    by_folder, by_file = read_hf(f"hf:{tmp_path}"), read_hf(f"hf:{tmp_path / 'config.json'}")
    assert by_folder is not None
    assert by_file is not None
    assert by_folder.agreed == by_file.agreed == named(noise | CONFIG).agreed
    assert "evil" not in by_folder.agreed
    assert json.loads(by_folder.agreed[3:]) == CONFIG | {
        "text_config": {"hidden_size": 3},
        "parts": [{"width": 3}, [{}], 7],
    }
    assert read_hf("tiny") is None
    assert not by_folder.has_weights
    (tmp_path / "model.safetensors").touch()
    assert by_folder.has_weights
    assert not by_file.has_weights


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "config.json does not exist"),
        ("{", "is not a config"),
        ("[]", "has no model_type"),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', "quantized"),
        ('{"model_type": "llama", "a": ' + '{"a": ' * 40 + "1" + "}" * 41, "nested more than 32 deep"),
        ('{"model_type": "llama", "a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested more than 32 deep"),
    ],
)
def test_what_is_no_config_is_refused(tmp_path: Path, config: str | None, told: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match=told):
        read_hf(f"hf:{tmp_path}")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match="save them as safetensors"):
        read_hf(f"hf:{tmp_path}")


def test_a_name_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has the model, its folder is used; else both places are named. A path that is none asks nobody."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    class Hub:
        @staticmethod
        def snapshot_download(name: str, allow_patterns: list[str]) -> str:
            if name != "me/model":
                raise OSError("404: no such model")
            return str(tmp_path)

    monkeypatch.setattr(optional.importlib, "import_module", lambda name: Hub)
    found = read_hf("hf:me/model")
    assert found is not None
    assert found.config == CONFIG
    with pytest.raises(UsageError, match="no such file or folder here, and the hub says: 404"):
        read_hf("hf:me/other")
    with pytest.raises(UsageError, match="no such file or folder; give"):
        read_hf("hf:/no/such/folder")

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(UsageError, match=r"pip install 'diloco\[transformers\]'"):
        read_hf("hf:me/model")
    with pytest.raises(UsageError, match=r"needs transformers, .*diloco\[transformers\]"):
        build_hf(found, 0)


def test_other_configs_differ_key_by_key() -> None:
    check_same(named(CONFIG), named(dict(reversed(CONFIG.items()))))
    with pytest.raises(SpecMismatch, match=r"hidden_size: here 32, the run has 64"):
        check_same(named(CONFIG), named(CONFIG | {"hidden_size": 64}))


# What is built: with transformers.


@pytest.mark.trainers
@pytest.mark.parametrize("config", KINDS, ids=[one["model_type"] for one in KINDS])
def test_all_parties_build_the_same_model(config: dict[str, Any]) -> None:
    """By the seed, whatever random numbers were drawn before, which go on as they were; with transformers' own names,
    in float32, in training mode. It learns by the trainer's own loss, with accumulation."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = build_hf(named(config), 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    again, other = build_hf(named(named(config).config), 0), build_hf(named(config), 1)
    assert weights_digest(first) == weights_digest(again) != weights_digest(other)
    assert {tensor.dtype for tensor in first.parameters()} == {torch.float32}
    assert any(name.startswith(("model.", "transformer.")) for name, _ in first.named_parameters())
    assert first.training
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    batch = torch.randint(0, 256, (4, 17))
    losses = []
    for _ in range(40):
        losses.append(add_gradients(forward_of(first, torch.device("cpu"), False), [batch[:2], batch[2:]], 2).item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(np.log(260), abs=0.6)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.trainers
def test_the_held_out_loss_is_without_dropout_and_leaves_the_model_as_it_was() -> None:
    """And is the mean of the trainer's loss over all blocks."""
    model, rows = build_hf(named(OTHERS[0]), 0), np.random.default_rng(0).integers(0, 256, (6, 33)).astype(np.uint8)
    loss = held_out_loss(model, rows, torch.device("cpu"))
    assert loss == held_out_loss(model, rows, torch.device("cpu"))
    assert model.training
    assert loss == pytest.approx(loss_of(model.eval(), torch.from_numpy(rows).long()).item(), abs=1e-4)


@pytest.mark.trainers
def test_weights_of_a_folder_are_the_runs_first_parameters(folder: Path, tmp_path: Path) -> None:
    """Whatever the seed, also where they are stored in bfloat16; those that are not all there are refused."""
    weights = read_hf(f"hf:{folder}")
    assert weights is not None
    assert weights_digest(build_hf(weights, 0)) == weights_digest(build_hf(named(CONFIG), 7))
    assert weights_digest(build_hf(weights, 0, weights=False)) == weights_digest(build_hf(named(CONFIG), 0))
    half: Any = build_hf(weights, 0).to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    stored = read_hf(f"hf:{tmp_path / 'half'}")
    assert stored is not None
    assert {tensor.dtype for tensor in build_hf(stored, 0).parameters()} == {torch.float32}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    larger = read_hf(f"hf:{folder}")
    assert larger is not None
    with pytest.raises(UsageError, match=r"lack \d+ of the model's tensors: model.layers.2"):
        build_hf(larger, 0)


@pytest.mark.trainers
def test_a_models_own_tokenizer_reads_the_text(folder: Path, book: Path) -> None:
    """Every document, with the end-of-text token behind it, whatever its length; a file of tokens stays as it is."""
    tokenizer(folder, book.read_text())
    library = pytest.importorskip("tokenizers")
    reader = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = read_hf(f"hf:{folder}")
    plain, text = open_for(str(book), None, 32), open_for(str(book), model, 32)
    assert (plain.tokenizer, text.entries) == (None, 260)
    assert len(text.train[:]) < len(plain.train[:])
    assert reader.decode([t for t in text.train[:].tolist() if t != 2]) == bytes(plain.train[:]).decode()
    assert text.train[-1] == 2
    assert text.fingerprint == open_for(str(book), model, 32).fingerprint != plain.fingerprint
    built = build_model(load(LearnerProcess, {"model": f"hf:{folder}", "seq_len": 32}), model, text)
    assert loss_of(built, torch.from_numpy(text.train[:33].astype(np.int64))[None]).item() < 8


@pytest.mark.trainers
def test_a_tokenizer_that_truncates_loses_no_text(folder: Path, book: Path) -> None:
    """Nor does one that fills up: what its file says of lengths is for other uses. Long documents are whole too."""
    book.write_text(book.read_text() * 20)
    tokenizer(folder, book.read_text())
    model = read_hf(f"hf:{folder}")
    whole = open_for(str(book), model, 32)
    library = pytest.importorskip("tokenizers")
    cutting = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (
        cutting.decode([t for t in whole.train[:].tolist() if t != 2]) == bytes(open_text(str(book)).train[:]).decode()
    )
    cutting.enable_truncation(16)
    cutting.enable_padding(length=16)
    cutting.save(str(folder / "tokenizer.json"))
    assert open_for(str(book), read_hf(f"hf:{folder}"), 32).fingerprint == whole.fingerprint


@pytest.mark.trainers
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_file_of_tokens_is_not_tokenised_again(folder: Path, book: Path, tmp_path: Path, kind: type) -> None:
    """Of one byte a token either: its tokens are no bytes of text."""
    tokenizer(folder, book.read_text())
    tokens = np.arange(5000).astype(kind) % 200
    np.save(tmp_path / "tokens.npy", tokens)
    text = open_for(str(tmp_path / "tokens.npy"), read_hf(f"hf:{folder}"), 32)
    np.testing.assert_array_equal(np.concatenate([text.train[:], text.validation[:]]), tokens)
    assert text.tokenizer is None


@pytest.mark.trainers
def test_shards_of_another_tokenizer_are_warned_of(folder: Path, book: Path, tmp_path: Path) -> None:
    """Once, with what to do. Those that the model's own has made are not: also where its file says how to truncate."""
    tokenizer(folder, book.read_text())
    library = pytest.importorskip("tokenizers")
    own = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.enable_truncation(16)
    own.save(str(folder / "tokenizer.json"))
    prepare = ["data", "prepare", str(book), "--separator", "a", "--tokenizer"]
    assert main([*prepare, str(folder), "--out", str(tmp_path / "own")]) == 0
    model = read_hf(f"hf:{folder}")
    with structlog.testing.capture_logs() as said:
        assert open_for(str(tmp_path / "own"), model, 32).tokenizer is None
    assert said == []
    tokenizer(folder, "another text altogether, of other words")
    with structlog.testing.capture_logs() as said:
        open_for(str(tmp_path / "own"), read_hf(f"hf:{folder}"), 32)
    assert [line["event"] for line in said] == ["tokenizer_differs"]
    assert f"diloco data prepare TEXT --tokenizer {folder}" in said[0]["detail"]
    assert main([*prepare, str(tmp_path / "own"), "--out", str(tmp_path / "again")]) == 0
    assert read_index(tmp_path / "again").fingerprint == read_index(tmp_path / "own").fingerprint


@pytest.mark.trainers
def test_too_much_text_is_to_be_prepared(folder: Path, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's tokenizer, which the message names."""
    tokenizer(folder, book.read_text())
    monkeypatch.setattr(tokenized, "MAX_BYTES", 10_000)
    with pytest.raises(UsageError, match=f"diloco data prepare {book} --tokenizer {folder}"):
        open_for(str(book), read_hf(f"hf:{folder}"), 32)


# A run: spec, followers, evaluator.


def run_of(book: Path, model: str, **told: Any) -> Spec:
    """The spec of a run of this model."""
    asked = load(LearnerProcess, {"data": str(book), "seq_len": 32, "model": model, **told})
    given = read_hf(model)
    text = open_for(str(book), given, 32)
    sync = SyncSettings(fragments=2)
    tensors = tensor_table(build_model(asked, given, text), sync)
    return Spec(sync=sync.sync_spec(), tensors=tensors, trainer=trainer_spec(asked, text, given))


@pytest.mark.trainers
def test_a_run_is_followed_wherever_its_folder_is(folder: Path, book: Path, tmp_path: Path) -> None:
    """Who is told nothing builds the spec's model; who is told a folder keeps it, if it has the same config."""
    spec = run_of(book, f"hf:{folder}")
    assert str(folder) not in str(spec.trainer)
    followed = follow(load(LearnerProcess, {"data": str(book)}), spec)
    assert followed.model == spec.trainer["model"]
    moved = folder.rename(tmp_path / "moved")
    assert follow(load(LearnerProcess, {"model": f"hf:{moved}"}), spec).model == f"hf:{moved}"
    (moved / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 64}))
    with pytest.raises(SpecMismatch, match="hidden_size: here 64, the run has 32"):
        follow(load(LearnerProcess, {"model": f"hf:{moved}"}), spec)
    with pytest.raises(SpecMismatch, match="model: here 'small', the run has 'hf:"):
        follow(load(LearnerProcess, {"model": "small"}), spec)


@pytest.mark.trainers
def test_the_evaluator_builds_the_specs_model_and_needs_no_weights(folder: Path, book: Path) -> None:
    spec = run_of(book, f"hf:{folder}")
    (folder / "model.safetensors").unlink()
    model, loss = built_in(spec, EvaluatorProcess(eval_tokens=256))
    assert [name for name, _ in model.named_parameters()] == [tensor.name for tensor in spec.tensors]
    assert loss(model) == pytest.approx(np.log(260), abs=0.5)
    assert weights_digest(model_of(spec.trainer)) == weights_digest(model)


@pytest.mark.trainers
@pytest.mark.parametrize("config", KINDS, ids=[one["model_type"] for one in KINDS])
def test_a_runs_own_config_has_its_tensors(config: dict[str, Any], book: Path) -> None:
    """Known without memory for them, and with random numbers as they were."""
    spec, before = run_of(book, "hf:" + json.dumps(config)), torch.get_rng_state()
    check_model(spec)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.trainers
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"intermediate_size": 2**40}, r"mlp.down_proj.weight is \(32, 1099511627776\) in the config"),
        ({"num_hidden_layers": 3}, r"layers.2.\S+ is \(.*\) in the config, but absent in the spec"),
        ({"num_hidden_layers": 1}, "is absent in the config"),
        ({"num_hidden_layers": 10**5}, "creates more tensors than the"),
    ],
)
def test_a_config_of_other_tensors_than_the_runs_takes_no_memory(
    book: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, int], told: str
) -> None:
    """The evaluator and a learner that follows refuse it before they build it."""
    spec = run_of(book, "hf:" + json.dumps(CONFIG))
    model = named(CONFIG | other).agreed
    false = spec.model_copy(update={"trainer": spec.trainer | {"model": model}})
    monkeypatch.setattr(hf, "build_hf", None)
    with pytest.raises(SpecMismatch, match=told):
        built_in(false, EvaluatorProcess())
    stop: Any = None
    with pytest.raises(SpecMismatch, match=told):
        trainer.train_once(
            load(LearnerProcess, {"data": str(book), "threads": 1}), false, "", torch.device("cpu"), stop, Ranks()
        )


@pytest.mark.trainers
def test_a_run_by_a_tokenizer_asks_for_it(folder: Path, book: Path) -> None:
    """Of the evaluator as of a learner: bytes would be other tokens."""
    tokenizer(folder, book.read_text())
    spec = run_of(book, f"hf:{folder}")
    with pytest.raises(UsageError, match=r"pass --model hf:FOLDER with tokenizer\.json"):
        built_in(spec, EvaluatorProcess())
    _, loss = built_in(spec, EvaluatorProcess(model=f"hf:{folder}", eval_tokens=64))
    assert callable(loss)
    tokenizer(folder, "another text altogether, of other words")
    with pytest.raises(SpecMismatch, match="is not the run's"):
        built_in(spec, EvaluatorProcess(model=f"hf:{folder}"))


class Joined(Exception):
    """It has come so far as to join."""


@pytest.mark.trainers
def test_who_lacks_the_weights_waits_for_who_has_them(
    folder: Path, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its random parameters could become the run's first ones."""
    agreed: list[dict[str, Any]] = []
    asked = iter([False, False, True])

    def join(model: nn.Module, *_: Any, trainer: dict[str, Any], **__: Any) -> None:
        agreed.append(trainer)
        raise Joined

    monkeypatch.setattr(trainer, "Learner", join)
    monkeypatch.setattr(trainer, "TIMES", LearnerTimes(slow_poll_s=0.0))
    monkeypatch.setattr(trainer, "has_version_0", lambda *_: next(asked))
    told: dict[str, Any] = {"data": str(book), "seq_len": 32, "threads": 1, "fragments": 2}
    spec = run_of(book, f"hf:{folder}")
    stop: Any = None
    with pytest.raises(Joined):
        trainer.train_once(
            load(LearnerProcess, told | {"model": f"hf:{folder}"}), None, "", torch.device("cpu"), stop, Ranks()
        )
    assert next(asked) is False
    spec = spec.model_copy(update={"trainer": spec.trainer | {"weights": agreed[0]["weights"]}})
    with pytest.raises(Joined):
        trainer.train_once(load(LearnerProcess, told), spec, "", torch.device("cpu"), stop, Ranks())
    assert list(asked) == []
    assert agreed[0] | {"data": None} == agreed[1] | {"data": None}


@pytest.mark.trainers
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about what it traces
def test_a_compiled_model_has_the_same_loss_and_names() -> None:
    """By a backend that compiles nothing: what is traced is the same."""
    model, batch = build_hf(named(CONFIG), 0), torch.randint(0, 256, (2, 17))
    forward = forward_of(model, torch.device("cpu"), True, "eager")
    assert loss_of(forward, batch).item() == pytest.approx(loss_of(model, batch).item(), rel=1e-5)
    sync = SyncSettings(fragments=2)
    assert tensor_table(forward, sync) == tensor_table(model, sync)


@pytest.mark.trainers
@pytest.mark.parametrize("config", KINDS, ids=lambda config: config["model_type"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_computed_again_and_bf16_are_for_all_models(config: dict[str, Any], precision: str) -> None:
    """Gradients are the same to the last bit, dropout included, and arrive in fp32 parameters."""
    found = []
    for again in (False, True):
        model = build_hf(named(config), 0)
        told = load(LearnerSettings, {"precision": precision, "checkpoint_activations": again})
        forward = training_forward(model, torch.device("cpu"), told)
        torch.manual_seed(3)
        batch = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
        add_gradients(forward, [batch], 1)
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert found[0]
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(*found, strict=True))
