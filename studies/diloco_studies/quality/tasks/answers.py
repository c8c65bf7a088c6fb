"""Text that ends in an answer: only the answer's bytes are learnt and measured. Knows no task."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by

END = b"\n"
"""Ends an answer."""
_NONE = -100
"""Target where there is nothing to learn."""


def rows_of(texts: Sequence[tuple[bytes, bytes]], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(prompt, answer) pairs as inputs (B, length) and targets (B, length), of which only the answers' and their end
    count.

    A prompt has one byte at least, and all of it fits.
    """
    inputs = np.zeros((len(texts), length), np.int64)
    targets = np.full((len(texts), length), _NONE, np.int64)
    for row, (prompt, answer) in enumerate(texts):
        whole = np.frombuffer(prompt + answer + END, np.uint8)
        inputs[row, : len(whole) - 1] = whole[:-1]
        targets[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return inputs, targets


def loss_of_answers(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats a byte of logits (B, T, V) over what counts of targets (B, T)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=_NONE)


class Scored:
    """Adds up what a model says of held-out answers."""

    def __init__(self) -> None:
        self._loss, self._bytes, self._exact, self._answers = 0.0, 0, 0, 0

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits (B, T, V) beside targets (B, T).

        An answer is exact where greedy decoding would write it and its end. That is so if each byte is the likeliest
        after the right ones before it, which one forward pass tells of all of them.
        """
        counts = targets != _NONE
        bytes_ = int(counts.sum())
        self._loss += loss_of_answers(logits, targets).item() * bytes_
        self._bytes += bytes_
        self._exact += int(((logits.argmax(-1) == targets) | ~counts).all(-1).sum())
        self._answers += len(targets)

    def measures(self) -> dict[str, float]:
        """Nats a byte, and the share of answers that are exact."""
        return {"value": self._loss / self._bytes, "exact": self._exact / self._answers}
