"""A text as blocks, and an epoch as a permutation of them. Pure: every learner computes the same."""

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.workers.permutation import permuted
from diloco.workers.trainer.data.tokens import Tokens, TokenText


class Blocks:
    """A text (tokens,) cut into blocks of seq_len + 1 tokens: the inputs and, shifted by one, the targets.

    Neighbouring blocks share one token, so that each token except the first is a target exactly once per epoch.
    """

    def __init__(self, text: TokenText, seq_len: int, seed: int = 0) -> None:
        self._text = text
        self._seq_len = seq_len
        self._seed = seed
        self.count = (len(text) - 1) // seq_len
        if self.count < 1:
            raise UsageError(f"seq_len={seq_len}: the text has {len(text)} tokens, which is not enough for one block")

    def block(self, epoch: int, index: int) -> Tokens:
        """Return block `index` (0..count-1) of an epoch's permutation, (seq_len + 1,)."""
        return self._at(permuted(index, self.count, b"/%d/%d" % (self._seed, epoch)))

    def spread(self, tokens: int) -> Tokens:
        """Return about `tokens` tokens in blocks spread evenly over the text, (blocks, seq_len + 1).

        This is the validation slice. It is the same for every seed, so that runs can be compared.
        """
        wanted = min(self.count, max(1, tokens // self._seq_len))
        return np.stack([self._at((2 * i + 1) * self.count // (2 * wanted)) for i in range(wanted)])

    def _at(self, place: int) -> Tokens:
        start = place * self._seq_len
        return self._text[start : start + self._seq_len + 1]
