"""A modern dense GPT: RoPE, RMSNorm, QK norm, SwiGLU, an embedding tied to the head, no bias anywhere.

Norms have no gains: the matrix after each norm can learn them, and tiny tensors would only add messages.
Shapes: B sequences, T tokens, D width, N heads, K = D / N head width, V vocabulary.
"""

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
from torch import nn
from torch.utils.checkpoint import checkpoint

from diloco.workers.trainer.models.sizes import SIZES, Size, check_size


def build(name: str, seed: int, vocab_size: int = 256) -> "GPT":
    """Build a model by the name of its size; the same seed gives the same parameters.

    Raises:
        UsageError: there is no such size.
    """
    check_size(name)
    with torch.device("cpu"):
        return GPT(SIZES[name], vocab_size, seed)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """Scale the last dimension to a root mean square of 1."""
    return F.rms_norm(x, (x.size(-1),))


def rotary_table(tokens: int, head_width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of the rotary embedding, each (T, 1, K / 2)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2, device=device) / head_width)
    angle = torch.outer(torch.arange(tokens, device=device), frequency)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply the rotary embedding to (B, T, N, K): position as an angle between the two halves of K."""
    cos, sin = (part.to(x.dtype) for part in table)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention, then a gated MLP, each added to the residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.proj = nn.Linear(size.width, size.width, bias=False)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Map the residual stream (B, T, D) to (B, T, D)."""
        b, t, d = x.shape
        q, k, v = self.qkv(rms_norm(x)).view(b, t, 3, self.heads, d // self.heads).unbind(2)  # (B, T, N, K) each
        q, k = rotate(rms_norm(q), table), rotate(rms_norm(k), table)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(rms_norm(x))

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        """Map normalised activations (B, T, D) to the MLP's output (B, T, D)."""
        out: torch.Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(self, size: Size, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(vocab_size, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.checkpoint_activations = False
        """True: the backward pass recomputes the activations within each block, so they are not kept."""
        self._init(seed)

    @torch.no_grad()
    def _init(self, seed: int) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        depth = (2 * self.size.layers) ** -0.5
        for name, tensor in self.named_parameters():
            std = 0.02 if name.startswith("embedding") else tensor.size(1) ** -0.5
            if name.endswith(("proj.weight", "down.weight")):
                std *= depth  # the residual stream keeps its scale whatever the depth
            tensor.normal_(0.0, std, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V) of tokens (B, T)."""
        table = rotary_table(tokens.size(1), self.size.width // self.size.heads, tokens.device)
        x = rms_norm(self.embedding(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, table, use_reentrant=False) if self.checkpoint_activations else block(x, table)
        return F.linear(rms_norm(x), self.embedding.weight)
