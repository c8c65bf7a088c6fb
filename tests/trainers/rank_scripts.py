"""Trainers of several ranks, each a learner by the lines of `scripts`: `torchrun ... rank_scripts.py KIND NAME FOLDER`.

All train the tiny Llama of `scripts`. At the end each rank says how many steps it made, and the digest of the model.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from tests.trainers import scripts

STEP_TOKENS = scripts.LENGTH * scripts.MICRO
"""Of one rank."""
MAX_STEPS = 10**6
QUIET = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
RUN = {"run": "ranks", "tokens": 20_000}


def llama() -> Any:
    """The model; its first pass waits until the learners `plain` and `them` are in the run, and each takes a while."""
    name, folder = sys.argv[2], Path(sys.argv[3])

    def pause() -> None:
        (folder / f"{name}.here").touch()
        while not all((folder / f"{one}.here").exists() for one in ("plain", "them")):
            time.sleep(0.05)
        time.sleep(0.02)

    return scripts.llama(0, pause)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of all values, whole tensors of which ranks hold shards; all ranks call it."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor: Any = tensors[name]
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode() + whole.detach().float().numpy().tobytes())
    return digest.hexdigest()[:16]


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """By the plain model's names."""
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}


def sharding_on_cpus() -> None:
    """Accelerate shards on GPUs only, and takes DDP on CPUs without a word; its code for FSDP2 is fine with them."""
    from accelerate import state
    from accelerate.utils import DistributedType

    make = state.AcceleratorState.__init__

    def made(self: Any, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        if named.get("fsdp_plugin") is not None:
            self._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": named["fsdp_plugin"]}

    state.AcceleratorState.__init__ = made  # type: ignore[method-assign]


def transformers(name: str, folder: Path, **more: Any) -> tuple[int, nn.Module]:
    from transformers import Trainer, TrainingArguments

    from diloco.integrations.transformers import DilocoCallback

    arguments = TrainingArguments(
        str(folder / "out"), max_steps=MAX_STEPS, per_device_train_batch_size=scripts.MICRO, **QUIET, **more
    )
    callback = DilocoCallback(learner_id=name, **RUN)
    trainer = Trainer(llama(), arguments, train_dataset=scripts.Rows(name), callbacks=[callback])
    trainer.train()
    return trainer.state.global_step, trainer.accelerator.unwrap_model(trainer.model_wrapped)


def transformers_fsdp(name: str, folder: Path) -> tuple[int, nn.Module]:
    sharding_on_cpus()
    wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return transformers(name, folder, fsdp=True, fsdp_config={"version": 2, **wrap})


def trl(name: str, folder: Path) -> tuple[int, nn.Module]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from diloco.integrations.transformers import DilocoCallback

    words = Tokenizer(models.WordLevel({str(i): i for i in range(scripts.VOCAB)}, unk_token="0"))  # noqa: S106
    how = {"max_steps": MAX_STEPS, "per_device_train_batch_size": scripts.MICRO, "bf16": False}
    trainer = SFTTrainer(
        llama(),
        SFTConfig(str(folder / "out"), **how, **QUIET),
        train_dataset=Dataset.from_dict({"input_ids": scripts.rows(name).tolist()}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),  # noqa: S106
        callbacks=[DilocoCallback(learner_id=name, **RUN)],
    )
    trainer.train()
    return trainer.state.global_step, trainer.accelerator.unwrap_model(trainer.model_wrapped)


def accelerate(name: str, folder: Path, **more: Any) -> tuple[int, nn.Module]:
    from accelerate import Accelerator

    from diloco.integrations.loops import RunLoader

    accelerator = Accelerator(cpu=True, **more)
    model = llama()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), scripts.loader(name)
    )
    steps = 0
    for batch in RunLoader(batches, model, optimizer, learner_id=name, **RUN):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps, accelerator.unwrap_model(model)


def accelerate_fsdp(name: str, folder: Path) -> tuple[int, nn.Module]:
    from accelerate import FullyShardedDataParallelPlugin

    sharding_on_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    return accelerate(name, folder, fsdp_plugin=plugin)


def lightning(name: str, folder: Path, strategy: Any = "ddp", shard: Callable[..., None] | None = None) -> Any:
    from lightning.pytorch import LightningModule, Trainer

    from diloco.integrations.lightning import DilocoCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def configure_model(self) -> None:
            if shard is not None:
                shard(self.model, self.device_mesh)

        def training_step(self, batch: Any, at: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callback = DilocoCallback(learner_id=name, **RUN)
    how = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": -1, "callbacks": [callback]}
    trainer, module = Trainer(**how, **quiet), Module()
    trainer.fit(module, scripts.loader(name))
    return int(trainer.global_step), module.model


def lightning_fsdp(name: str, folder: Path) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(model: Any, mesh: Any) -> None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])

    return lightning(name, folder, ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), shard)


def plain(name: str, folder: Path) -> tuple[int, nn.Module]:
    from diloco import Learner

    model, steps = llama(), 0
    optimizer, batches = torch.optim.AdamW(model.parameters(), lr=3e-3), scripts.endless(name)
    with Learner(model, optimizer, learner_id=name, **RUN) as learner:
        while not learner.finished:
            batch = next(batches)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=STEP_TOKENS)
            steps += 1
    learner.load_globals()
    return steps, model


KINDS = {
    one.__name__: one
    for one in (transformers, transformers_fsdp, trl, accelerate, accelerate_fsdp, lightning, lightning_fsdp, plain)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    steps, model = KINDS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    sharded = any(hasattr(p, "device_mesh") for p in model.parameters())
    said = f"ended {steps} {digest_of(parameters_of(model))} {sharded}\n"
    os.write(1, said.encode())  # at once: ranks write into one file
    if distributed.is_initialized():
        distributed.destroy_process_group()  # as the docs say
