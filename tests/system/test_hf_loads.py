"""What `diloco export --hf` writes is what transformers and peft load: after real training, and after a real run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco import Learner, cli
from diloco.pipeline.settings import SyncSettings
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.recipe import held_out_loss
from tests import HANGING_S
from tests.parties import ROOT, environment
from tests.workers.test_device_encoding import a_syncer

pytestmark = [pytest.mark.trainers, pytest.mark.redis]
SYNC = SyncSettings(
    fragments=2,
    sync_interval=2,
    first_interval=0,
    quorum=1,
    tokens=1200,
    global_codec="fp32",  # so that learners have what checkpoints have, to the last bit
)
TOKENS = torch.arange(32).reshape(2, 16)


def tiny(**config: Any) -> Any:
    """A random Llama of two layers."""
    import transformers

    torch.manual_seed(0)
    given = {
        **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(given | config)))


def train(url: str, run: str, model: nn.Module, saved: Path) -> None:
    """A short run of one learner, whose model is the run's afterwards."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with a_syncer(url, run, checkpoint_dir=saved):
        learner = Learner(model.train(), optimizer, run=run, redis_url=url, sync=SYNC, leave_s=20.0)
        with learner:
            learner.attach(tokens=TOKENS.numel())
            while not learner.finished:
                model(TOKENS, labels=TOKENS).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        learner.load_globals()


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(TOKENS).logits.float()
    return found


def export(*arguments: object) -> None:
    assert cli.main(["export", *map(str, arguments)]) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_trained_whole_loads_from_its_config_alone(redis_server: str, tmp_path: Path, tied: bool) -> None:
    """Bit for bit, also where the head is tied to the embedding and has no name of its own."""
    import transformers

    model = tiny(tie_word_embeddings=tied)
    before = logits(model)
    train(redis_server, f"whole-{tied}", model, tmp_path / "saved")
    model.config.save_pretrained(tmp_path / "config")
    export(tmp_path / "saved", tmp_path / "out", "--hf", tmp_path / "config")
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.allclose(before, logits(model), atol=0.1)


def test_a_model_whose_first_layer_is_frozen_takes_it_from_the_folder(
    redis_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the config's bfloat16: what was trained rounded to it, what was not as it was. It is known to be the run's,
    which had it in float32."""
    import transformers

    model = tiny(tie_word_embeddings=True)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model.float()
    model.model.layers[0].requires_grad_(False)
    train(redis_server, "frozen", model, tmp_path / "saved")
    capsys.readouterr()
    export(tmp_path / "saved", tmp_path / "out", "--hf", tmp_path / "base")
    assert "warning" not in capsys.readouterr().err
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype is torch.bfloat16
    there = dict(loaded.named_parameters())
    assert all(torch.equal(one.bfloat16(), there[name]) for name, one in model.named_parameters())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # by peft, of transformers
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_loads_as_peft_saves_it(redis_server: str, tmp_path: Path, dora: bool) -> None:
    """With a module that is trained whole beside it: the same file that peft writes."""
    import peft

    base = tiny(tie_word_embeddings=False)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=4, use_dora=dora, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config)
    model.peft_config["default"].save_pretrained(tmp_path / "config")
    train(redis_server, f"adapter-{dora}", model, tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", "--hf", tmp_path / "config")
    again = type(base).from_pretrained(tmp_path / "base")
    plain = logits(again)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "out")
    assert torch.allclose(logits(loaded), logits(model), atol=1e-6)
    assert not torch.allclose(logits(loaded), plain, atol=0.1)
    model.save_pretrained(tmp_path / "theirs")
    from safetensors.torch import load_file

    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_run_of_a_folders_model_is_exported_and_loads(tmp_path: Path) -> None:
    """`diloco run --model hf:FOLDER` on a short text: the loss falls from that of the folder's weights, the evaluator's
    last one is that of the model that is exported, and its logits are those of the run's globals."""
    import transformers

    tiny(tie_word_embeddings=True).save_pretrained(tmp_path / "llama")
    book = tmp_path / "book.txt"
    book.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(800)))
    small = "--fragments 4 --sync-interval 6 --seq-len 64 --batch 4 --tokens 60k --learners 2"
    command = ["run", "--model", f"hf:{tmp_path / 'llama'}", "--data", book, "--out", tmp_path / "out", *small.split()]
    done = subprocess.run(
        [sys.executable, "-m", "diloco", *map(str, command)],
        env=environment(DILOCO_EVAL_EVERY="500ms", DILOCO_EVAL_TOKENS="2048"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGING_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["evaluations"][-1]["final"]
    assert report["global_val_loss"] < 4.0
    assert report["sample"].startswith("def ")
    export(tmp_path / "out", tmp_path / "hf", "--hf", tmp_path / "llama")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    held_out = Blocks(open_text(str(book)).validation, 64).spread(2048)
    assert held_out_loss(loaded, held_out, torch.device("cpu")) == pytest.approx(report["global_val_loss"], rel=1e-4)
    globals_ = tiny(tie_word_embeddings=True)
    globals_.load_state_dict(_globals(tmp_path))
    assert torch.equal(logits(loaded), logits(globals_))


def _globals(folder: Path) -> dict[str, torch.Tensor]:
    """Of the run's last checkpoint, with the head's name for the embedding that it is tied to."""
    from safetensors.torch import load_file

    export(folder / "out", folder / "globals.safetensors")
    found = load_file(folder / "globals.safetensors")
    return found | {"lm_head.weight": found["model.embed_tokens.weight"]}
