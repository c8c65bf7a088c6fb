"""scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, a fifth of them held out."""

from functools import cache

import numpy as np
import numpy.typing as npt

HELD_OUT = 5
"""One in so many is held out."""

Pixels = npt.NDArray[np.float32]


@cache
def load_digits() -> tuple[Pixels, npt.NDArray[np.int64]]:
    """Images (N, 8, 8) in 0..1 and classes (N,), in the library's order."""
    from sklearn import datasets  # takes a second

    digits = datasets.load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.astype(np.int64)


class Digits:
    """Those to train on, and those held out."""

    side, channels, patch, classes = 8, 1, 2, 10

    def __init__(self) -> None:
        images, classes = load_digits()
        held_out = np.arange(len(images)) % HELD_OUT == 0
        self._train, self.train_classes = images[~held_out], classes[~held_out]
        self._held_out, self.held_out_classes = images[held_out], classes[held_out]

    def train(self, index: int) -> Pixels:
        """(1, 8, 8)."""
        pixels: Pixels = self._train[index][None]
        return pixels

    def held_out(self, index: int) -> Pixels:
        """(1, 8, 8)."""
        pixels: Pixels = self._held_out[index][None]
        return pixels
