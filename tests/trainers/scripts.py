"""Ordinary training scripts of other people's trainers, each a learner by the lines that are marked so; as processes.

All train the same tiny random Llama on the same rule (the next token is 3 x + 1), with accumulation of 4, clipping
and bf16 autocast, each on rows of its own, and save the model at the end, as such scripts do.
"""

import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

BEYOND = "# diloco"
"""Marks a line beyond a script's ordinary form."""
VOCAB, LENGTH, ROWS, MICRO, ACCUMULATE = 32, 16, 1024, 8, 4
STEP_TOKENS = LENGTH * MICRO * ACCUMULATE
LIBRARIES = (
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "trl.trainer.sft_trainer",
    "datasets",
    "lightning.fabric",
    "lightning.pytorch",
    "accelerate",
    "diloco.workers.learner",
)
"""What the scripts import: read once, for all of their processes."""
SLOW_S = 0.1
"""Of a micro-batch, until the folder has a file `hurry`."""
HOLD = 25 * ACCUMULATE
"""Micro-batches after which a script waits for that file: so a run lasts until a killed learner has trained again."""


def llama(seed: int = 0, pause: Callable[[], None] = lambda: None) -> Any:
    """pause: called before each forward pass."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, **sizes))
    model.register_forward_pre_hook(lambda *_: pause())
    return model


def rows(name: str, count: int = ROWS) -> torch.Tensor:
    """Token ids (count, LENGTH) of a learner's own."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    found = [torch.randint(VOCAB, (count,), generator=generator)]
    for _ in range(LENGTH - 1):
        found.append((3 * found[-1] + 1) % VOCAB)
    return torch.stack(found, 1)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, name: str, count: int = ROWS) -> None:
        self._rows = rows(name, count)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[at], "labels": self._rows[at]}


def loader(name: str) -> Any:
    return torch.utils.data.DataLoader(Rows(name), batch_size=MICRO, shuffle=True)


def loss_of(model: Any) -> float:
    """Mean loss on rows that no learner trains on."""
    with torch.no_grad():
        ids = rows("held out", 64)
        return float(model.eval()(input_ids=ids, labels=ids).loss)


# --- the scripts: each says how many steps it made ---------------------------------------------------------------


def transformers(name: str, out: Path, model: Any, ready: Callable[[], None], **run: Any) -> int:
    from transformers import Trainer, TrainingArguments, trainer_utils

    from diloco.integrations.transformers import DilocoCallback  # diloco

    batches = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATE, "max_steps": 100_000}
    how = {"learning_rate": 3e-3, "max_grad_norm": 1.0, "bf16": True, "use_cpu": True, "lr_scheduler_type": "constant"}
    words = {"report_to": [], "logging_steps": 5, "save_steps": 10, "save_total_limit": 1, "disable_tqdm": True}
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(out) + "-checkpoints", **batches, **how, **words),
        train_dataset=Rows(name),
        callbacks=[DilocoCallback(learner_id=name, **run)],  # diloco
    )
    ready()
    found = Path(str(out) + "-checkpoints").is_dir() and trainer_utils.get_last_checkpoint(str(out) + "-checkpoints")
    trainer.train(resume_from_checkpoint=found or None)
    trainer.save_model(str(out))
    return trainer.state.global_step - trainer._initial_global_step


def trl(name: str, out: Path, model: Any, ready: Callable[[], None], **run: Any) -> int:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from diloco.integrations.transformers import DilocoCallback  # diloco

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))  # noqa: S106
    batches = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATE, "max_steps": 100_000}
    how = {"learning_rate": 3e-3, "max_grad_norm": 1.0, "bf16": True, "use_cpu": True, "save_strategy": "no"}
    trainer = SFTTrainer(
        model,
        SFTConfig(output_dir=str(out), **batches, **how, report_to=[], logging_steps=5, disable_tqdm=True),
        train_dataset=Dataset.from_dict({"input_ids": rows(name).tolist()}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),  # noqa: S106
        callbacks=[DilocoCallback(learner_id=name, **run)],  # diloco
    )
    ready()
    trainer.train()
    trainer.save_model(str(out))
    return int(trainer.state.global_step)


def lightning(name: str, out: Path, model: Any, ready: Callable[[], None], **run: Any) -> int:
    from lightning.pytorch import LightningModule, Trainer

    from diloco.integrations.lightning import DilocoCallback  # diloco

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, at: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        max_epochs=-1,
        callbacks=[DilocoCallback(learner_id=name, **run)],  # diloco
        **quiet,
    )
    ready()
    trainer.fit(Module(), loader(name))
    model.save_pretrained(out)
    return int(trainer.global_step)


def accelerate(name: str, out: Path, model: Any, ready: Callable[[], None], **run: Any) -> int:
    from accelerate import Accelerator

    from diloco.integrations.loops import RunLoader  # diloco

    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, mixed_precision="bf16", cpu=True)
    plain = model
    model, optimizer, batches = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), loader(name))
    ready()
    steps = 0
    batches = RunLoader(batches, model, optimizer, learner_id=name, **run)  # diloco
    for _ in range(3):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    steps += 1
                optimizer.step()
                optimizer.zero_grad()
    accelerator.unwrap_model(model).save_pretrained(out)
    return steps


def fabric(name: str, out: Path, model: Any, ready: Callable[[], None], **run: Any) -> int:
    from lightning.fabric import Fabric

    from diloco.integrations.loops import RunLoader  # diloco

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    plain = model
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3))
    batches = fabric.setup_dataloaders(loader(name))
    ready()
    steps = 0
    batches = RunLoader(batches, model, optimizer, learner_id=name, **run)  # diloco
    for made, batch in enumerate(batches, 1):
        fabric.backward(model(**batch).loss / ACCUMULATE)
        if made % ACCUMULATE == 0:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    plain.save_pretrained(out)
    return steps


def attach(name: str, out: Path, model: Any, ready: Callable[[], None], **run: Any) -> int:
    from diloco import Learner  # diloco

    steps = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ready()
    with Learner(model, optimizer, learner_id=name, **run) as learner:  # diloco
        learner.attach(tokens=STEP_TOKENS, loss=lambda: loss)  # diloco
        batches = endless(name)
        while not learner.finished:  # diloco
            for _ in range(ACCUMULATE):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(**next(batches)).loss
                (loss / ACCUMULATE).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    learner.load_globals()  # diloco
    model.save_pretrained(out)
    return steps


def endless(name: str) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader(name)


KINDS = {one.__name__: one for one in (transformers, trl, lightning, accelerate, fabric, attach)}


def lines_beyond(kind: str) -> int:
    """Lines of a script that are there for the run."""
    return sum(line.rstrip().endswith(BEYOND) for line in inspect.getsource(KINDS[kind]).splitlines())


def main(kind: str, folder: Path, others: Sequence[str], environment: Mapping[str, str]) -> None:
    """The process of one learner, named for its kind: its output goes to `folder`/KIND.log, its model to `folder`/KIND.

    others: learners that are waited for, so that all are in the run from its start.
    """
    with (folder / f"{kind}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= environment
    torch.set_num_threads(1)

    def ready() -> None:
        (folder / f"{kind}.ready").touch()
        while not all((folder / f"{other}.ready").exists() for other in others):
            time.sleep(0.05)

    made = itertools.count(1)

    def pause() -> None:
        before = next(made)
        if before == ACCUMULATE + 2:
            print("trained", flush=True)  # a step at least
        while not (folder / "hurry").exists():
            time.sleep(SLOW_S)
            if before < HOLD:
                break

    run = {"run": "trainers", "tokens": "150k", "state_dir": folder / f"{kind}-state"}
    steps = KINDS[kind](kind, folder / kind, llama(0, pause), ready, **run)
    print(f"end {steps}", flush=True)
