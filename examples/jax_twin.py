"""Train the model of jax_model.py in torch as a learner of the same run. Learners of both kinds may join in any order.

Start a syncer (`diloco syncer --run jax-model`), then this and jax_model.py, all with DILOCO_REDIS_URL set.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from diloco import Learner

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 24, 192, 2048

text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


class Twin(nn.Module):
    """The model, whose tensors have the names and the order of the table `NAMES` in jax_model.py."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, WIDTH)
        self.hidden = nn.Linear(CONTEXT * WIDTH, HIDDEN)
        self.out = nn.Linear(HIDDEN, 256)
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map bytes (B, CONTEXT) to logits (B, 256)."""
        return self.out(torch.tanh(self.hidden(self.table(inputs).flatten(1))))


def loss_now() -> torch.Tensor:
    """Draw rows of the text, and return the mean loss in nats of their last bytes."""
    rows = text[torch.randint(len(text) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)]
    return nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])


model, loss = Twin(), None
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)  # the default weight decay of optax
with Learner(model, optimizer, run="jax-model") as learner:
    rates = learner.progress_schedule()
    while not learner.finished:
        loss = loss_now()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=BATCH, loss=loss)
        rates.step()
learner.load_globals()  # from here on the model has the run's values
torch.manual_seed(0)  # the same rows for all learners
own = f"last loss {loss.item():.3f}" if loss is not None else "the run is finished already"
print(f"{own}, of the run's values {loss_now().item():.3f}")
