"""Train a mixture of experts as a learner, in a plain loop, on Python's own source.

Start a syncer (`diloco syncer --run experts`), then this script once per learner, all with DILOCO_REDIS_URL set.
"""

import os
from pathlib import Path

import torch
from torch import nn

from diloco import Learner

BATCH, LENGTH, WIDTH, EXPERTS = 8, 64, 96, 8
text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()  # a byte is a token


class Mixture(nn.Module):
    """A layer that sends each token through the two experts to which the router gives the largest weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (N, WIDTH) to (N, WIDTH) and the balancing loss, which is 1 if all experts are used equally."""
        shares = self.router(x).softmax(-1)  # (N, EXPERTS)
        weights, chosen = shares.topk(2)  # (N, 2) each
        used = nn.functional.one_hot(chosen, EXPERTS).float().mean((0, 1))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weights[token, rank, None])
        return out, EXPERTS * (used * shares.mean(0)).sum()


class Model(nn.Module):
    """A causal transformer with two layers, each with a mixture of experts in place of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.attention = nn.ModuleList(nn.MultiheadAttention(WIDTH, 3, batch_first=True) for _ in range(2))
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map tokens (B, LENGTH) to logits (B, LENGTH, 256) and the balancing loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x, balance = self.embedding(x) + self.place, torch.zeros(())
        for layer, (attention, mixture) in enumerate(zip(self.attention, self.mixtures, strict=True)):
            h = self.norms[2 * layer](x)
            x = x + attention(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]
            mixed, uneven = mixture(self.norms[2 * layer + 1](x).flatten(0, 1))
            x, balance = x + mixed.view_as(x), balance + uneven
        return self.head(self.norms[4](x)), balance


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loss = None


def losses_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of the next byte and the balancing loss, for `count` rows of the text drawn at random."""
    starts = torch.randint(len(tokens) - LENGTH, (count, 1))
    rows = tokens[starts + torch.arange(LENGTH + 1)]  # (count, LENGTH + 1)
    logits, balance = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), balance


with Learner(model, optimizer, run="experts") as learner:
    learner.attach(tokens=BATCH * LENGTH, loss=lambda: loss)
    while not learner.finished:
        loss, balance = losses_of(BATCH)  # each learner draws its own rows
        (loss + 0.01 * balance).backward()  # balances the experts over this learner's batch alone
        optimizer.step()
        optimizer.zero_grad()
learner.load_globals()  # from here on the model has the run's values
torch.manual_seed(0)  # the same rows for all learners
with torch.no_grad():
    print(f"loss of the run's model {losses_of(512)[0].item():.3f}")
