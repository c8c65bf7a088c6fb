"""A text as blocks, and an epoch as a permutation of them. Pure: every learner computes the same."""

import numpy as np
import xxhash

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data.tokens import Tokens, TokenText

_ROUNDS = 4


def permuted(index: int, count: int, key: bytes) -> int:
    """Return the place of `index` in the permutation of range(count) that `key` selects.

    This is a Feistel network with cycle walking. It needs no table, so an epoch may have any number of blocks, and it
    uses no library's random numbers, so learners with different versions of numpy agree.
    """
    bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = index >> bits, index & mask
        for round_ in range(_ROUNDS):
            mixed = xxhash.xxh3_64_intdigest(b"%d.%d" % (round_, right) + key)
            left, right = right, left ^ (mixed & mask)
        index = (left << bits) | right
        # The network permutes the next power of four from `count` on: repeat until the index is in range again.
        if index < count:
            return index


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
            raise UsageError(f"seq_len={seq_len}: the text has {len(text)} tokens, not enough for one block")

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
