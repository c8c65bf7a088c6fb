"""Promises about what is asked of a model of transformers before anything is built: by the launcher and each party."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.cli import main
from diloco.launcher.option_checks import check
from diloco.options import RunProcess
from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.settings import EvaluatorProcess, LearnerProcess, SyncSettings, load
from diloco.workers.parameters import tensor_table
from diloco.workers.trainer import data_parallel, evaluator_process, optional, trainer
from diloco.workers.trainer.data import tokenized
from diloco.workers.trainer.data.preparing import write_shards
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.data.text_sources import Source
from diloco.workers.trainer.data.tokenized import check_model, open_for
from diloco.workers.trainer.models import gpt, hf
from diloco.workers.trainer.models.hf import build_hf
from diloco.workers.trainer.models.hf_config import HfModel, config_of
from diloco.workers.trainer.recipe import trainer_spec
from diloco.workers.trainer.together import Ranks
from tests.workers.byte_tokenizer import ByteTokenizer

SMALL: dict[str, Any] = {
    **{"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 64},
}
LLAMA = SMALL | {"model_type": "llama"}
BERT = SMALL | {"model_type": "bert"}
XLM = {"model_type": "xlm", "vocab_size": 260, "emb_dim": 32, "n_layers": 2, "n_heads": 2}
BART = SMALL | {"model_type": "bart", "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2}
TROCR = BART | {"model_type": "trocr", "decoder_ffn_dim": 48}


def model(config: dict[str, Any]) -> str:
    return "hf:" + json.dumps(config)


def tokenizer(folder: Path, text: str, entries: int = 260) -> None:
    """Trained on a text, and put beside a model: of so many entries."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([text], library.trainers.BpeTrainer(vocab_size=entries, initial_alphabet=alphabet))
    made.save(str(folder / "tokenizer.json"))


def later_tokens_change(built: Any) -> bool:
    """Whether the logits of a token depend on what follows it, by their gradient: that of what is masked is 0."""
    kept: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    built.eval().get_input_embeddings().register_forward_hook(keep)
    logits = built(torch.arange(5, 13)[None]).logits
    (found,) = torch.autograd.grad(logits[0, 3].square().sum(), kept[0])
    assert found[0, :4].abs().max() > 0
    return bool(found[0, 4:].abs().max() > 0)


def test_the_launcher_says_at_once_that_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(optional.importlib, "import_module", missing)
    check(RunProcess(model="tiny", data="stdlib"))
    with pytest.raises(UsageError, match="needs transformers"):
        check(RunProcess(model=model(LLAMA), data="stdlib"))


def test_the_launcher_of_a_built_in_model_loads_neither_transformers_nor_torch() -> None:
    """Nor what reads texts: only a model of transformers is looked at."""
    code = (
        "import sys; from diloco.launcher.option_checks import check; from diloco.options import RunProcess; "
        "check(RunProcess()); "
        "print(*{'torch', 'transformers', 'diloco.workers.trainer.data'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"\n"


@pytest.mark.trainers
@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "no-such"}, "'no-such' is unknown to transformers"),
        ({"model_type": "vit"}, "'vit' is not a causal language model: transformers' AutoModelForCausalLM has no such"),
        ({"model_type": "t5"}, "'t5' is not a causal language model: transformers' AutoModelForCausalLM has no such"),
        (
            BERT,
            "'bert' is not a causal language model: is_decoder is False in its config; set it to True",
        ),
        (BART, "'bart' is not a causal language model: is_encoder_decoder is True in its config, so its encoder would"),
        (XLM, "'xlm' is not a causal language model: causal is False"),
        (LLAMA | {"is_causal": False}, "'llama' is not a causal language model: is_causal is False"),
        (SMALL | {"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is"),
        ({"model_type": "xlnet"}, "'xlnet' is not a causal language model: its tokens attend to later ones"),
        ({"model_type": "musicgen"}, "'musicgen' is not a causal language model: is_encoder_decoder is True in its"),
        (LLAMA | {"hidden_size": "wide"}, "is invalid"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_is_no_causal_language_model_is_refused(
    config: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name and what is needed, in one line, before its text is looked at: whoever is to build it."""
    with pytest.raises(UsageError, match=told) as error:
        check_model(HfModel(config), "/no/such/text", 32)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(tokenized, "open_text", None)
    with pytest.raises(UsageError, match=told):
        open_for("stdlib", HfModel(config), 32)
    with pytest.raises(UsageError, match=told):
        build_hf(HfModel(config), 0)


@pytest.mark.trainers
@pytest.mark.parametrize(
    "config",
    [
        *(LLAMA, SMALL | {"model_type": "gpt_neox"}, SMALL | {"model_type": "opt", "ffn_dim": 48}),
        *(BERT | {"is_decoder": True}, XLM | {"causal": True}),
        *(TROCR, BART | {"is_encoder_decoder": False, "is_decoder": True}),
    ],
    ids=lambda config: config["model_type"],
)
def test_what_is_taken_sees_no_later_token(config: dict[str, Any]) -> None:
    """Also where another value of its config would make it no causal language model."""
    assert not later_tokens_change(build_hf(HfModel(config), 0))


@pytest.mark.trainers
def test_a_model_must_know_the_texts_tokens_and_have_its_positions(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file of tokens its largest one decides, and the vocabulary of its tokenizer of token shards: exactly, since
    what is rounded up for a built-in model would be too large. Shards are not read for it."""

    def judged(config: dict[str, Any], data: Path, seq_len: int = 64) -> None:
        check_model(HfModel(config), str(data), seq_len)
        open_for(str(data), HfModel(config), seq_len)

    judged(LLAMA, book)
    with pytest.raises(UsageError, match=r"seq_len=65: the model has 64 positions .*: pass --seq-len 64"):
        judged(LLAMA, book, 65)
    with pytest.raises(UsageError, match="a byte text has 256 entries, but the model's vocab_size is 100"):
        judged(LLAMA | {"vocab_size": 100}, book)
    tokens = np.arange(5000, dtype=np.uint16) % 258
    np.save(tmp_path / "fits.npy", tokens)
    np.save(tmp_path / "not.npy", np.append(tokens, np.uint16(260)))
    judged(LLAMA, tmp_path / "fits.npy")
    with pytest.raises(UsageError, match=r"not.npy' has 261 entries, but the model's vocab_size is 260"):
        judged(LLAMA, tmp_path / "not.npy")
    (tmp_path / "shards").mkdir()
    source = Source([lambda: iter(["a story " * 1000])], counted=True, skipped=0)
    write_shards(tmp_path / "shards", source, ByteTokenizer(above=3), ByteTokenizer.separator)
    shards = open_text(str(tmp_path / "shards"))
    assert (shards.entries, shards.vocab) == (260, 320)
    monkeypatch.setattr(type(shards.train), "__getitem__", None)
    check_model(HfModel(LLAMA), str(tmp_path / "shards"), 64)
    with pytest.raises(UsageError, match="shards' has 260 entries, but the model's vocab_size is 259"):
        check_model(HfModel(LLAMA | {"vocab_size": 259}), str(tmp_path / "shards"), 64)


@pytest.mark.trainers
def test_a_tokenizer_of_more_entries_than_the_model_is_refused_by_all(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With both numbers: `diloco run` begins nothing, the others neither tokenise nor build."""
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    tokenizer(folder, book.read_text(), 300)
    told = r"tokenizer.json has 300 entries, but the model's vocab_size is 260"
    assert main(["run", "--model", f"hf:{folder}", "--data", str(book), "--seq-len", "32", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "tokenizer.json has 300 entries, but the model's vocab_size is 260" in " ".join(said.split())
    assert not out.exists()
    monkeypatch.setattr(tokenized, "_tokenised", None)
    monkeypatch.setattr(hf, "build_hf", None)
    asked: dict[str, Any] = {"model": f"hf:{folder}", "data": str(book), "seq_len": 32, "threads": 1}
    stop: Any = None
    with pytest.raises(UsageError, match=told):
        trainer.train_once(load(LearnerProcess, asked), None, "", torch.device("cpu"), stop, Ranks())
    rank: Any = load(data_parallel.RankProcess, asked)
    with pytest.raises(UsageError, match=told):
        data_parallel.parts_of(rank)
    with pytest.raises(UsageError, match=told):
        evaluator_process.built_in(run_of(book), EvaluatorProcess(model=f"hf:{folder}"))


def run_of(data: Path) -> Spec:
    """The spec of a run of a built-in model."""
    asked = load(LearnerProcess, {"data": str(data), "seq_len": 32, "model": "nano"})
    text = open_text(str(data))
    tensors = tensor_table(gpt.build("nano", asked.seed, text.vocab), SyncSettings(fragments=2))
    return Spec(sync=SyncSettings(fragments=2).sync_spec(), tensors=tensors, trainer=trainer_spec(asked, text))


def test_who_comes_with_another_vocabulary_than_the_runs_builds_nothing(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late learner, and the evaluator: whether its text is another one, or the spec alone says so."""
    np.save(tmp_path / "other.npy", np.arange(5000, dtype=np.uint16) % 999)
    spec = run_of(book)
    false = spec.model_copy(update={"trainer": spec.trainer | {"vocab": 2**20}})
    monkeypatch.setattr(gpt, "GPT", None)
    stop: Any = None
    for run, data, told in (
        (spec, tmp_path / "other.npy", "fingerprint here"),
        (false, book, "with a vocabulary of 256, but the run's model has 1048576"),
    ):
        with pytest.raises(SpecMismatch, match=told):
            trainer.train_once(
                load(LearnerProcess, {"data": str(data), "threads": 1}), run, "", torch.device("cpu"), stop, Ranks()
            )
        with pytest.raises(SpecMismatch, match=told):
            evaluator_process.built_in(run, EvaluatorProcess(data=str(data)))


@pytest.mark.trainers
def test_the_kinds_without_a_switch_are_transformers_own() -> None:
    """A kind that it no longer has would be named for nothing."""
    transformers = pytest.importorskip("transformers")
    from diloco.workers.trainer.models.hf_config import _CAUSAL_ANYWAY, _WITHOUT_A_SWITCH

    for kind in _CAUSAL_ANYWAY | _WITHOUT_A_SWITCH:
        assert transformers.CONFIG_MAPPING[kind] in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    assert config_of(HfModel(SMALL | {"model_type": "gpt_neox"})).is_decoder is False
