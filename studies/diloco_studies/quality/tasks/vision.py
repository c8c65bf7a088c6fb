"""Image classification with a small ViT, on handwritten digits.

Each epoch shows the training images in another order, each moved by up to an eighth of its side either way.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
import xxhash
from torch import nn

from diloco.workers.permutation import permuted
from diloco_studies.quality.models.vit import Images, build_vit
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks.digits import Digits, Pixels

EVALUATED_AT_ONCE = 512


def moved(image: Pixels, far: int, key: bytes, seed: int) -> Pixels:
    """An image (C, S, S) moved by up to `far` pixels either way, as key and seed say; what is bared is black."""
    side, ways, chance = image.shape[-1], 2 * far + 1, xxhash.xxh3_64_intdigest(key, seed)
    down, right = chance % ways, chance // ways % ways
    wide: Pixels = np.pad(image, ((0, 0), (far, far), (far, far)))
    return wide[:, down : down + side, right : right + side]


class VisionTask:
    """An example is an image, and counts as one token."""

    measure = "held-out accuracy (%)"
    higher_is_better = True
    same_kernels = False
    example_tokens = 1

    def __init__(self, run: LabRun, device: torch.device) -> None:
        self._run, self._device, self._pictures = run, device, Digits()
        self.examples = len(self._pictures.train_classes)

    def build(self) -> nn.Module:
        """A ViT."""
        of = self._pictures
        images = Images(side=of.side, channels=of.channels, patch=of.patch, classes=of.classes)
        return build_vit(self._run.model, images, self._run.seed).to(self._device)

    def batch(self, chosen: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Images (B, C, S, S) and classes (B,)."""
        of = self._pictures
        side, far = of.side, of.side // 8
        pixels = np.zeros((len(chosen), of.channels, side, side), np.float32)
        classes = np.zeros(len(chosen), np.int64)
        for row, (epoch, index) in enumerate(chosen):
            at = permuted(index, self.examples, b"/%d/%d" % (self._run.seed, epoch))
            pixels[row] = moved(of.train(at), far, b"%d.%d" % (epoch, at), self._run.seed)
            classes[row] = of.train_classes[at]
        return torch.from_numpy(pixels).to(self._device), torch.from_numpy(classes).to(self._device)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Nats an image."""
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy in percent, and the loss, on the held-out images."""
        of = self._pictures
        count, right, loss = len(of.held_out_classes), 0.0, 0.0
        for start in range(0, count, EVALUATED_AT_ONCE):
            part = range(start, min(start + EVALUATED_AT_ONCE, count))
            pixels = torch.from_numpy(np.stack([of.held_out(index) for index in part])).to(self._device)
            classes = torch.from_numpy(of.held_out_classes[part.start : part.stop]).to(self._device)
            logits = model(pixels).float()
            right += (logits.argmax(-1) == classes).sum().item()
            loss += F.cross_entropy(logits, classes, reduction="sum").item()
        return {"value": 100 * right / count, "loss": loss / count}
