"""Chance that can be repeated: every draw is a function of the seed and of what is drawn for. Pure.

Draws do not depend on each other's order, so that leaving one fault out of a world changes no other's draw.
"""

from collections.abc import Sequence
from typing import TypeVar

import xxhash

T = TypeVar("T")


class Chance:
    """All draws of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def integer(self, *what: object) -> int:
        """An integer in 0..2**64-1."""
        return xxhash.xxh3_64_intdigest(repr(what).encode(), self._seed)

    def share(self, *what: object) -> float:
        """A number in [0, 1)."""
        return self.integer(*what) / 2**64

    def between(self, low: float, high: float, *what: object) -> float:
        """A number in [low, high)."""
        return low + (high - low) * self.share(*what)

    def one_of(self, choices: Sequence[T], *what: object) -> T:
        """One of the choices."""
        return choices[self.integer(*what) % len(choices)]

    def hex(self, digits: int, *what: object) -> str:
        """Hexadecimal digits, 32 at most."""
        return xxhash.xxh3_128_hexdigest(repr(what).encode(), self._seed)[:digits]
