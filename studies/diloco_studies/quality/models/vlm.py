"""A small vision-language model: the GPT, which reads an image's patches before the text.

Shapes: B images, C channels, H x W pixels, P patches, T tokens, D width, V vocabulary.
"""

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
from torch import nn

from diloco.workers.trainer.models.gpt import GPT, rms_norm, rotary_table
from diloco.workers.trainer.models.sizes import SIZES, Size, check_size


class VisionLanguage(GPT):
    """Patches with learned places as a prefix; a token sees all of them, and the tokens before it."""

    def __init__(self, size: Size, patches: int, patch: int, channels: int, vocab_size: int, seed: int) -> None:
        """patches: in an image. patch: pixels a side of each."""
        super().__init__(size, vocab_size, seed)
        self.side = patch
        self.patch = nn.Linear(channels * patch**2, size.width, bias=False)
        self.place = nn.Parameter(torch.empty(patches, size.width))
        self._init(seed)

    def forward(self, pixels: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Images (B, C, H, W) and tokens (B, T) to the tokens' logits (B, T, V)."""
        patches = F.unfold(pixels, self.side, stride=self.side).transpose(1, 2)  # (B, P, C * side * side)
        embedded = torch.cat((self.patch(patches) + self.place, self.embedding(tokens)), dim=1)
        table = rotary_table(embedded.size(1), self.size.width // self.size.heads, embedded.device)
        x = rms_norm(embedded)
        for block in self.blocks:
            x = block(x, table)
        return F.linear(rms_norm(x), self.embedding.weight)[:, patches.size(1) :]


def build_vision_language(name: str, seed: int, patches: int, patch: int) -> VisionLanguage:
    """A model of bytes and grey images by the name of its GPT's size; the same seed gives the same parameters.

    patches: in an image. patch: pixels a side of each.

    Raises:
        UsageError: unknown name.
    """
    check_size(name)
    return VisionLanguage(SIZES[name], patches, patch, 1, 256, seed)
