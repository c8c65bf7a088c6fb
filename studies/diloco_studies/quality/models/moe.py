"""The mixture-of-experts variant of the GPT: each token goes through the k experts that its router likes best.

An expert is a gated MLP with 1/k of the dense model's hidden width, so that a token costs what it does in that model.
The balancing loss is over the tokens of one batch, hence a learner's own (paper, settings); no token is dropped.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.models.gpt import GPT, Block
from diloco.workers.trainer.models.sizes import SIZES, Size, size_table


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, D) to (N, D)."""
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Mixture(nn.Module):
    """Top-k routing over E experts, each chosen one weighted by its share of the k highest probabilities."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden // chosen) for _ in range(experts))
        self.balance = torch.zeros(())
        """Balancing loss of the last batch: 1 where all experts are used alike, E where only one is."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """(B, T, D) to (B, T, D)."""
        flat = h.reshape(-1, h.size(-1))  # (N, D)
        shares = self.router(flat).float().softmax(-1)  # (N, E)
        weights, chosen = shares.topk(self.chosen, dim=-1)  # (N, k) each
        weights = weights / weights.sum(-1, keepdim=True)
        used = F.one_hot(chosen, len(self.experts)).float().sum(1).mean(0) / self.chosen  # (E,), sum 1, no gradient
        self.balance = len(self.experts) * (used * shares.mean(0)).sum()
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)
            weighted = expert(flat[token]) * weights[token, rank, None]
            out = out.index_add(0, token, weighted.to(out.dtype))
        return out.view_as(h)


class MixtureBlock(Block):
    """A block with a mixture in place of the MLP."""

    def __init__(self, size: Size, experts: int, chosen: int) -> None:
        super().__init__(size)
        del self.gate, self.up, self.down
        self.mixture = Mixture(size.width, size.hidden, experts, chosen)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        """(B, T, D) to (B, T, D)."""
        out: torch.Tensor = self.mixture(h)
        return out


class MixtureGPT(GPT):
    """The GPT with mixtures. `balance` is the mean balancing loss over its layers, of the last batch."""

    def __init__(self, size: Size, vocab_size: int, seed: int, experts: int, chosen: int) -> None:
        super().__init__(replace(size, layers=1), vocab_size, seed)
        self.size = size
        self.blocks = nn.ModuleList(MixtureBlock(size, experts, chosen) for _ in range(size.layers))
        self._init(seed)

    @property
    def balance(self) -> torch.Tensor:
        """A scalar, with its gradient."""
        return torch.stack([block.mixture.balance for block in self.blocks if isinstance(block, MixtureBlock)]).mean()


def build_mixture(name: str, seed: int, experts: int, chosen: int, vocab_size: int = 256) -> MixtureGPT:
    """A model by its size's name; the same seed gives the same parameters.

    Args:
        name: a size of `gpt.SIZES`, which the activated parameters have.
        seed: of the parameters.
        experts: E.
        chosen: k, of which a token goes through.
        vocab_size: V.

    Raises:
        UsageError: unknown name, or k that does not fit.
    """
    if name not in SIZES:
        raise UsageError(f"model={name!r}: unknown size; choose one of {size_table(vocab_size)}")
    if not 1 <= chosen <= experts or SIZES[name].hidden % chosen:
        raise UsageError(f"experts={experts}, of which {chosen} per token: it must divide {SIZES[name].hidden}")
    return MixtureGPT(SIZES[name], vocab_size, seed, experts, chosen)
