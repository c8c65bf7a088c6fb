"""Train your own model in your own loop as a learner: an LSTM learns to continue sequences with an unknown step.

Start `diloco syncer --run own-model`, then this once per learner, each with a DILOCO_LEARNER_ID and DILOCO_REDIS_URL.
"""

import torch
from torch import nn

from diloco import Learner


class Counter(nn.Module):
    """Predicts the next number."""

    def __init__(self, symbols: int = 64, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map numbers (B, T) to logits (B, T, symbols)."""
        return self.head(self.lstm(self.embedding(x))[0])


model = Counter()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loss = None
with Learner(model, optimizer, run="own-model") as learner:
    while not learner.finished:
        first, stride = torch.randint(64, (32, 1)), torch.randint(1, 8, (32, 1))
        numbers = (first + stride * torch.arange(33)) % 64  # (32, 33): 32 sequences, one number ahead
        inputs, targets = numbers[:, :-1], numbers[:, 1:]
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=inputs.numel(), loss=loss)
    print(f"last loss {loss.item():.3f}" if loss is not None else "the run is finished already")
