"""A small vision transformer over the GPT's blocks, without the causal mask: patches in, one class out.

Shapes: B images, C channels, S pixels a side, D width, T patches.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.models.gpt import Block, rms_norm, rotary_table, rotate
from diloco.workers.trainer.models.sizes import Size

SIZES: dict[str, Size] = {
    "tiny": Size(layers=4, width=96, heads=3, hidden=256),
    "small": Size(layers=6, width=192, heads=3, hidden=512),
    "base": Size(layers=12, width=384, heads=6, hidden=1024),
}


@dataclass(frozen=True, slots=True)
class Images:
    """What a model is to look at."""

    side: int
    """Pixels, a multiple of `patch`."""
    channels: int
    patch: int
    classes: int


class Seeing(Block):
    """A block in which each patch sees all."""

    def forward(self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(B, T, D) to (B, T, D)."""
        b, t, d = x.shape
        q, k, v = self.qkv(rms_norm(x)).view(b, t, 3, self.heads, d // self.heads).unbind(2)  # (B, T, N, K) each
        q, k = rotate(rms_norm(q), table), rotate(rms_norm(k), table)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(rms_norm(x))


class ViT(nn.Module):
    """Patches with learned places, blocks, the mean over patches, classes."""

    def __init__(self, size: Size, images: Images, seed: int) -> None:
        super().__init__()
        self.size, self.images = size, images
        patches = (images.side // images.patch) ** 2
        self.patch = nn.Linear(images.channels * images.patch**2, size.width, bias=False)
        self.place = nn.Parameter(torch.empty(patches, size.width))
        self.blocks = nn.ModuleList(Seeing(size) for _ in range(size.layers))
        self.head = nn.Linear(size.width, images.classes, bias=False)
        self._init(seed)

    @torch.no_grad()
    def _init(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        depth = (2 * self.size.layers) ** -0.5
        for name, tensor in self.named_parameters():
            std = 0.02 if name in ("place", "head.weight") else tensor.size(1) ** -0.5
            if name.endswith(("proj.weight", "down.weight")):
                std *= depth
            tensor.normal_(0.0, std, generator=generator)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(B, C, S, S) to logits (B, classes)."""
        patch = self.images.patch
        patches = F.unfold(pixels, patch, stride=patch).transpose(1, 2)  # (B, T, C * patch * patch)
        x = rms_norm(self.patch(patches) + self.place)
        table = rotary_table(x.size(1), self.size.width // self.size.heads, x.device)
        for block in self.blocks:
            x = block(x, table)
        logits: torch.Tensor = self.head(rms_norm(x).mean(1))
        return logits


def build_vit(name: str, images: Images, seed: int) -> ViT:
    """A model by its size's name; the same seed gives the same parameters.

    Raises:
        UsageError: unknown name.
    """
    if name not in SIZES:
        raise UsageError(f"model={name!r}: unknown ViT size; choose one of {', '.join(SIZES)}")
    return ViT(SIZES[name], images, seed)
