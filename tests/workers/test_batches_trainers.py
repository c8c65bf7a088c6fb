"""Batches from the work queue in the loaders of other people's trainers: each index once, acknowledged when trained on.

All draw one batch ahead, or all of a step's batches at once; none puts a sampler of its own in the place of ours.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from diloco.workers.learner import Learner
from tests.workers.fed import Numbers
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_batches import SYNC, on_queue

pytestmark = [
    pytest.mark.redis,
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
LENGTH, BATCH, ACCUMULATE = 90, 4, 2
WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2, "multiprocessing_context": "fork"}]


class Net(nn.Module):
    """Trains on numbers, and remembers which."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.seen += x.tolist()
        return {"loss": self.layer(x[:, None].float() / 100).square().mean()}


@contextmanager
def reading(url: str, run: str, **workers: Any) -> Iterator[tuple[Net, Learner, DataLoader[Any]]]:
    """A learner that is attached, and its loader; then see that each index was trained once in each pass."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with a_syncer(url, run):
        with Learner(model, optimizer, run=run, redis_url=url, sync=SYNC) as learner:
            learner.attach(tokens=BATCH * ACCUMULATE)
            batches = learner.batches(LENGTH, BATCH, accumulate=ACCUMULATE)
            yield model, learner, DataLoader(Numbers(LENGTH), batch_sampler=batches, **workers)
            assert len(model.seen) == 2 * len(batches) * BATCH
            assert learner.joined.training.rounds.steps == len(batches)
        left = on_queue(url, run)
    trained = Counter(model.seen)
    assert sum(rest for _, rest in left) == LENGTH * (1 + max(epoch for epoch, _ in left)) - trained.total()
    assert set(trained.values()) <= {2, 3}, "two passes of full batches are a little more than two epochs"
    assert trained.total() - 2 * LENGTH == sum(times == 3 for times in trained.values())


@pytest.mark.parametrize("workers", WORKERS, ids=["no workers", "fork"])
def test_accelerate_keeps_our_batches(redis_server: str, workers: dict[str, Any]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    with reading(redis_server, f"accelerate-{len(workers)}", **workers) as (model, learner, loader):
        ours = loader.batch_sampler
        prepared, optimizer, loader = accelerator.prepare(model, learner.optimizer, loader)
        assert loader.batch_sampler is ours
        assert loader.total_batch_size == BATCH
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(prepared):
                    accelerator.backward(prepared(batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()


@pytest.mark.parametrize("workers", WORKERS, ids=["no workers", "fork"])
def test_lightning_keeps_our_batches(redis_server: str, workers: dict[str, Any], tmp_path: Path) -> None:
    from lightning import pytorch as lightning

    with reading(redis_server, f"lightning-{len(workers)}", **workers) as (model, learner, loader):

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
                loss: torch.Tensor = self.model(batch)["loss"]
                return loss

            def configure_optimizers(self) -> Any:
                return learner.optimizer

        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=ACCUMULATE,
            default_root_dir=tmp_path,
            enable_model_summary=False,
            **quiet,
        )
        trainer.fit(Module(), loader)
        assert trainer.train_dataloader.batch_sampler is loader.batch_sampler


@pytest.mark.parametrize("workers", WORKERS, ids=["no workers", "fork"])
def test_the_transformers_trainer_keeps_our_batches(redis_server: str, workers: dict[str, Any], tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    with reading(redis_server, f"transformers-{len(workers)}", **workers) as (model, learner, loader):
        loader.collate_fn = lambda rows: {"x": torch.tensor(rows), "labels": torch.zeros(len(rows))}

        class Ours(Trainer):
            def get_train_dataloader(self) -> Any:
                return self.accelerator.prepare(loader)

        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=2,
            gradient_accumulation_steps=ACCUMULATE,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Ours(model, arguments, train_dataset=loader.dataset, optimizers=(learner.optimizer, None))
        trainer.train()
        assert trainer.state.global_step == len(loader)
