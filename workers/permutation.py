"""A permutation of any number of indices that every learner computes alike. Pure."""

import xxhash

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
