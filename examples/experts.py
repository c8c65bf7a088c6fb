"""A mixture of experts as a learner, in a plain loop: the package's own model, on Python's own source.

Start a syncer (`diloco syncer --run experts`), then this as often as you like, all with DILOCO_REDIS_URL set.
"""

import os
from pathlib import Path

import torch
from torch import nn

from diloco import Learner
from diloco.workers.trainer.models.moe import build_mixture

BATCH, LENGTH = 8, 64
text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()  # a byte is a token

model = build_mixture("nano", seed=0, experts=8, chosen=2)  # any nn.Module would do
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loss = None


def loss_of(count: int) -> torch.Tensor:
    """Of so many rows of the text, drawn at random."""
    starts = torch.randint(len(tokens) - LENGTH, (count, 1))
    rows = tokens[starts + torch.arange(LENGTH + 1)]  # (count, LENGTH + 1)
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


with Learner(model, optimizer, run="experts") as learner:
    learner.attach(tokens=BATCH * LENGTH, loss=lambda: loss)
    while not learner.finished:
        loss = loss_of(BATCH)  # each learner draws its own
        (loss + 0.01 * model.balance).backward()  # experts used alike: by this learner's batch, nobody else's
        optimizer.step()
        optimizer.zero_grad()
learner.load_globals()  # the model is the run's from here on
torch.manual_seed(0)  # the same rows for all
with torch.no_grad():
    print(f"loss of the run's model {loss_of(512).item():.3f}")
