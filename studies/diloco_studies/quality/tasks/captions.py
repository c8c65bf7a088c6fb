"""A vision-language task: three handwritten digits side by side, and the number they are in words, byte by byte.

Held-out images are made of digits that no training image has. All is made here of scikit-learn's digits.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from diloco.workers.permutation import permuted
from diloco_studies.quality.models.vlm import build_vision_language
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks.answers import Scored, loss_of_answers, rows_of
from diloco_studies.quality.tasks.digits import Digits, Pixels
from diloco_studies.quality.tasks.vision import moved

DIGITS = 3
PATCH = 4
LONGEST = len("seven hundred and seventy-seven\n")
BEGIN = b"\n"
"""What the words come after."""
EVALUATED_AT_ONCE = 120

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Of 0..999, as the British say it."""
    hundreds, rest = divmod(number, 100)
    tens, ones = divmod(rest, 10)
    below = _ONES[rest] if rest < 20 else _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    if not hundreds:
        return below
    return f"{_ONES[hundreds]} hundred" + (f" and {below}" if rest else "")


class CaptionTask:
    """An example is an image with its words; it counts as many tokens as the model reads of it at most.

    An epoch has each training digit once at each place, each moved by up to a pixel.
    """

    measure = "held-out loss (nats a byte)"
    higher_is_better = False
    same_kernels = False

    def __init__(self, run: LabRun, device: torch.device) -> None:
        self._run, self._device, self._digits = run, device, Digits()
        self._patches = DIGITS * (Digits.side // PATCH) ** 2
        self.examples = len(self._digits.train_classes)
        self.example_tokens = self._patches + LONGEST

    def build(self) -> nn.Module:
        """A GPT with patches before its text."""
        return build_vision_language(self._run.model, self._run.seed, self._patches, PATCH).to(self._device)

    def batch(self, chosen: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Images (B, 1, 8, 24), inputs and targets (B, T)."""
        seed, of = self._run.seed, self._digits
        places = [
            [permuted(index, self.examples, b"/%d/%d/%d" % (seed, epoch, place)) for place in range(DIGITS)]
            for epoch, index in chosen
        ]
        pixels = [
            [moved(of.train(at), 1, b"%d.%d.%d" % (epoch, at, place), seed) for place, at in enumerate(ats)]
            for (epoch, _), ats in zip(chosen, places, strict=True)
        ]
        return self._tensors(pixels, of.train_classes[np.array(places)])

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Nats a byte of the words."""
        pixels, inputs, targets = batch
        return loss_of_answers(model(pixels, inputs), targets)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Nats a byte of held-out words, and the share of held-out images whose words are exactly right."""
        of, scored = self._digits, Scored()
        count = len(of.held_out_classes)
        places = np.array([[permuted(n, count, b"/%d" % place) for place in range(DIGITS)] for n in range(count)])
        for part in np.split(places, range(EVALUATED_AT_ONCE, count, EVALUATED_AT_ONCE)):
            pixels = [[of.held_out(at) for at in ats] for ats in part]
            images, inputs, targets = self._tensors(pixels, of.held_out_classes[part])
            scored.add(model(images, inputs), targets)
        return scored.measures()

    def _tensors(self, pixels: Sequence[Sequence[Pixels]], classes: npt.NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        """pixels: a digit at each place (1, 8, 8). classes: (B, 3)."""
        images = np.stack([np.concatenate(row, axis=2) for row in pixels])
        numbers = classes @ (10 ** np.arange(DIGITS)[::-1])
        inputs, targets = rows_of([(BEGIN, in_words(number).encode()) for number in numbers.tolist()], LONGEST)
        return tuple(torch.from_numpy(part).to(self._device) for part in (images, inputs, targets))
