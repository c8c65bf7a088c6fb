"""transformers' Trainer with two ranks of torchrun: they are one learner."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.ranks.party import ROOT, Party, free_port

pytestmark = [pytest.mark.trainers, pytest.mark.redis, pytest.mark.timeout(400)]

SCRIPT = """
import sys
import torch
from transformers import Trainer, TrainingArguments
from diloco.integrations.transformers import DilocoCallback
from tests.trainers.scripts import Rows, llama

folder = sys.argv[1]
arguments = TrainingArguments(
    folder, max_steps=10**6, per_device_train_batch_size=8, report_to=[], save_strategy="no", use_cpu=True,
    disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
)
callback = DilocoCallback(run="ranks", learner_id="trainer", tokens=20_000)
trainer = Trainer(llama(), arguments, train_dataset=Rows("them"), callbacks=[callback])
trainer.train()
model = trainer.accelerator.unwrap_model(trainer.model)
print(f"ended {trainer.state.global_step} {sum(float(p.double().sum()) for p in model.parameters())!r}", flush=True)
"""


def test_the_ranks_of_a_trainer_are_one_learner(tmp_path: Path) -> None:
    """They end after the same step with the run's model; their tokens are counted once."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())
    with Party(tmp_path, sync_interval=8, fragments=4) as party:
        path = {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
        launched = party.start("launch.log", path, "-m", *torchrun, script, tmp_path / "out")
        assert party.ended(launched, limit_s=300) == [0], party.shown()
        ended = party.said("launch", "ended")
        assert len(ended) == 2, party.shown()
        assert ended[0] == ended[1]
        steps = int(ended[0].split()[1])
        assert abs(steps * 2 * 8 * 16 - 20_000) < 40 * 2 * 8 * 16, "each rank's tokens count once"
