"""Image classification: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, and a small ViT.

A fifth is held out. Each epoch shows the others in another order, each moved by up to a pixel either way.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
import xxhash
from torch import nn

from pipeline.errors import UsageError
from workers.data.blocks import permuted
from workers.models.vit import Images, build_vit

from .settings import LabRun

IMAGES = Images(side=8, channels=1, patch=2, classes=10)
HELD_OUT = 5
"""One in so many is held out."""

Pixels = npt.NDArray[np.float32]


@cache
def load_digits() -> tuple[Pixels, npt.NDArray[np.int64]]:
    """Images (N, 8, 8) in 0..1 and classes (N,), in the library's order.

    Raises:
        UsageError: scikit-learn is missing.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise UsageError(
            "task='digits' needs scikit-learn, which is not installed: pip install 'decoupled-diloco[vision]'"
        ) from error
    digits = datasets.load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.astype(np.int64)


class DigitsTask:
    """An example is an image, and counts as one token."""

    measure = "held-out accuracy (%)"
    higher_is_better = True
    example_tokens = 1

    def __init__(self, run: LabRun, device: torch.device) -> None:
        images, classes = load_digits()
        held_out = np.arange(len(images)) % HELD_OUT == 0
        self._run, self._device = run, device
        self._images, self._classes = images[~held_out], classes[~held_out]
        self._held_out = torch.from_numpy(images[held_out])[:, None].to(device)
        self._held_out_classes = torch.from_numpy(classes[held_out]).to(device)
        self.examples = len(self._images)

    def build(self) -> nn.Module:
        """A ViT."""
        return build_vit(self._run.model, IMAGES, self._run.seed).to(self._device)

    def batch(self, chosen: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Images (B, 1, 8, 8) and classes (B,)."""
        pixels = np.zeros((len(chosen), 1, 8, 8), np.float32)
        classes = np.zeros(len(chosen), np.int64)
        for row, (epoch, index) in enumerate(chosen):
            at = permuted(index, self.examples, b"/%d/%d" % (self._run.seed, epoch))
            moved = xxhash.xxh3_64_intdigest(b"%d.%d" % (epoch, at), self._run.seed)
            down, right = moved % 3, moved // 3 % 3
            pixels[row, 0] = np.pad(self._images[at], 1)[down : down + 8, right : right + 8]
            classes[row] = self._classes[at]
        return torch.from_numpy(pixels).to(self._device), torch.from_numpy(classes).to(self._device)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Nats an image."""
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy in percent, and the loss, on the held-out images."""
        logits = model(self._held_out).float()
        right = (logits.argmax(-1) == self._held_out_classes).float().mean().item()
        return {"value": 100 * right, "loss": F.cross_entropy(logits, self._held_out_classes).item()}
