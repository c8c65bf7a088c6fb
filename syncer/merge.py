"""The merge: contributions to one pseudogradient (paper, RDA). Pure numpy, in blocks.

Blocks of 128k elements stay in the cache between conversion, multiplication and addition; that is three times
the speed of whole-array numpy. Sums run in the order of the given list, so equal inputs give equal bits, however many
of them were summed (`Sum.add`) before the last one was here.

Two kinds of work, for the sake of `replay`. Elementwise work is single float32 operations in a given order: the same
bits on every machine, and so are numpy's sums of a row's elements (its length), in numpy's own order
(`tests/test_merge.py` has it). Any other reduction (a tensor's length) sums in an order that the machine's libraries
choose: the same to about 1e-7. Such reductions enter the elementwise work as factors, so a merge can be repeated bit
for bit from recorded ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.buffers import pooled
from pipeline.codec import Vector
from pipeline.fragments import FragmentLayout, Slot

from .norms import BLOCK, Float32, Float64, squares

_NO_DIRECTION = 1e-30
"""A delta shorter than this has no direction: in bf16 and float32 it is rounding noise."""

_CANCELLED = 1e-6
"""Unit vectors whose weighted mean is shorter than this cancel: what is left is rounding noise."""

ROWS_BLOCK = 32 * 1024
"""Elements of whole rows that are merged at a time, in float64: a few arrays of so many stay in the cache."""

MOST_SHARE = 2.0**20
"""No contribution is multiplied by more than this (over its length), lest the sum leave float32's range."""

Array = npt.NDArray[Any]
Finish = Callable[[int, int], None]


class Reduced(NamedTuple):
    """What a merge measured on its way."""

    norm: float
    """L2 norm of the pseudogradient."""
    directions: Float64
    """(tensors,) L2 norm of each tensor's weighted sum of directions; 0 where it is not merged by its direction."""


def merge_shares(counters: Sequence[tuple[int, int]], rule: Literal["tokens", "equal"] = "tokens") -> tuple[float, ...]:
    """Merge weights but for their common factor, which is known once all are in: from (steps, tokens), both positive.

    In shares of the first contribution, which has 1; or of the largest, if that has over `MOST_SHARE`. So those of the
    first few are known before the others are here. Single float64 operations: the same bits on every machine.
    """
    if rule == "equal":
        return (1.0,) * len(counters)
    raw = [tokens * (tokens / steps) for steps, tokens in counters]
    of = raw[0] if max(raw) <= MOST_SHARE * raw[0] else max(raw)
    return tuple(one / of for one in raw)


def merge_weights(counters: Sequence[tuple[int, int]], rule: Literal["tokens", "equal"] = "tokens") -> Float64:
    """Merge weights (contributions,) from (steps, tokens) since the base, both positive.

    By "tokens" w = tokens * (tokens / steps), quantity times quality, normalised to sum 1 (paper, token weights); by
    "equal" each the same.
    """
    shares = np.array(merge_shares(counters, rule))
    weights: Float64 = shares / shares.sum()
    return weights


def _blocks(start: int, stop: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    return ((at, min(at + size, stop)) for at in range(start, stop, size))


def _row_blocks(slot: Slot) -> Iterator[tuple[int, int]]:
    """Whole rows."""
    columns = _columns(slot)
    return _blocks(slot.start, slot.stop, columns * max(1, ROWS_BLOCK // columns))


def _columns(slot: Slot) -> int:
    return (slot.stop - slot.start) // (slot.tensor.shape[0] if slot.tensor.shape else 1)


def _factors(slot: Slot, lengths: Sequence[float], shares: Sequence[float]) -> list[float]:
    """By what each delta of a tensor is multiplied before it is summed."""
    if slot.tensor.rule != "rda":
        return list(shares)
    return [share / length if length > _NO_DIRECTION else 0.0 for share, length in zip(shares, lengths, strict=True)]


def _row_lengths(rows: Float64) -> Float64:
    """L2 norm (rows,) of rows (rows, columns): the same bits on every machine."""
    lengths: Float64 = np.sqrt(np.add.reduce(np.square(rows), axis=1))
    return lengths


class _Rows(NamedTuple):
    """Sums over contributions of a tensor's rows. In float64, since short rows nearly cancel far oftener."""

    directions: Float64
    """(rows, columns)"""
    lengths: Float64
    """(rows,)"""

    @classmethod
    def zero(cls, rows: int, columns: int) -> "_Rows":
        directions = pooled(rows * columns, np.float64).reshape(rows, columns)
        directions.fill(0)
        return cls(directions, np.zeros(rows, np.float64))

    def part(self, start: int, stop: int) -> "_Rows":
        """Rows [start, stop), sharing memory."""
        return _Rows(self.directions[start:stop], self.lengths[start:stop])

    def add(self, parts: Sequence[Array], shares: Sequence[float]) -> None:
        """parts: each (rows, columns)."""
        for part, share in zip(parts, shares, strict=True):
            rows = part.astype(np.float64)
            lengths = _row_lengths(rows)
            np.add(self.lengths, share * lengths, out=self.lengths)
            rows *= np.divide(share, lengths, out=np.zeros_like(lengths), where=lengths > _NO_DIRECTION)[:, None]
            np.add(self.directions, rows, out=self.directions)

    def merged(self, scale: float, out: Float32) -> None:
        """out: (rows, columns) float32, the mean length times the direction of the mean direction of each row."""
        size = scale * _row_lengths(self.directions)
        factors = np.divide(scale * scale * self.lengths, size, out=np.zeros_like(size), where=size > _CANCELLED)
        np.multiply(self.directions, factors[:, None], out=out, casting="same_kind")


class Sum:
    """Contributions to one pseudogradient, summed as they come; the last ones when it is made.

    What was added before `close` and what is added by it makes no difference to any bit.
    """

    def __init__(self, layout: FragmentLayout, out: Float32) -> None:
        """out: (elements,) float32, overwritten: with the sum so far, in the end with the pseudogradient."""
        self._slots, self._out = layout.slots, out
        self._rows: dict[int, _Rows] = {}
        self._term = np.empty(min(BLOCK, layout.elements), np.float32)
        self.count = 0
        """Contributions that were added."""

    def add(self, deltas: Sequence[Vector], norms: Sequence[Float64], shares: Sequence[float]) -> None:
        """Sum these too: as `merge`."""
        for t, slot in enumerate(self._slots):
            if slot.stop == slot.start:
                continue
            if slot.tensor.rule == "rda-row":
                columns = _columns(slot)
                if t not in self._rows:
                    self._rows[t] = _Rows.zero((slot.stop - slot.start) // columns, columns)
                for start, stop in _row_blocks(slot):
                    rows = self._rows[t].part((start - slot.start) // columns, (stop - slot.start) // columns)
                    rows.add([delta[start:stop].reshape(-1, columns) for delta in deltas], shares)
            else:
                factors = _factors(slot, [float(one[t]) for one in norms], shares)
                for start, stop in _blocks(slot.start, slot.stop):
                    self._add(deltas, factors, start, stop, self.count)
        self.count += len(deltas)

    def close(
        self,
        deltas: Sequence[Vector],
        norms: Sequence[Float64],
        shares: Sequence[float],
        recorded: Float64 | None = None,
        finish: Finish | None = None,
    ) -> Reduced:
        """Make the pseudogradient of all contributions, as `merge`; the first `count` are in the sum already."""
        # One alone comes out as it went in, whatever the rule.
        alone = len(deltas) == 1
        done, scale, total = 0 if alone else self.count, 1 / math.fsum(shares), 0.0
        directions = np.zeros(len(self._slots), np.float64)
        for t, slot in enumerate(self._slots):
            if slot.stop == slot.start:
                continue
            lengths = [float(one[t]) for one in norms]
            if alone or slot.tensor.rule == "mean":
                factors = [1.0] if alone else list(shares)
                total += self._mean(slot, deltas[done:], factors[done:], done, 1.0 if alone else scale, finish)
            elif slot.tensor.rule == "rda-row":
                total += self._close_rows(t, slot, deltas[done:], shares[done:], done, scale, finish)
            else:
                factors = _factors(slot, lengths, shares)
                found = 0.0
                for start, stop in _blocks(slot.start, slot.stop):
                    found += squares(self._add(deltas[done:], factors[done:], start, stop, done))
                directions[t] = scale * math.sqrt(found)
                direction = float(directions[t] if recorded is None else recorded[t])
                length = scale * math.fsum(share * one for share, one in zip(shares, lengths, strict=True))
                factor = scale * (length / direction) if direction > _CANCELLED else 0.0
                total += found * factor * factor
                for start, stop in _blocks(slot.start, slot.stop):
                    np.multiply(self._out[start:stop], factor, out=self._out[start:stop])
                    if finish is not None:
                        finish(start, stop)
        return Reduced(math.sqrt(total), directions)

    def _add(self, deltas: Sequence[Vector], factors: Sequence[float], start: int, stop: int, done: int) -> Float32:
        """Elements [start, stop) of the sum, with so many in it, after factor * delta of these, in float32."""
        block, term = self._out[start:stop], self._term[: stop - start]
        for number, (delta, factor) in enumerate(zip(deltas, factors, strict=True), done):
            part, into = delta[start:stop], term if number else block
            if part.dtype != np.float32:
                np.copyto(into, part)
                part = into
            if factor != 1.0 or (part is not into and not number):
                np.multiply(part, factor, out=into)
                part = into
            if number:
                np.add(block, part, out=block)
        return block

    def _mean(
        self,
        slot: Slot,
        deltas: Sequence[Vector],
        factors: Sequence[float],
        done: int,
        scale: float,
        finish: Finish | None,
    ) -> float:
        """Weighted mean of a tensor; the sum of its squares."""
        found = 0.0
        for start, stop in _blocks(slot.start, slot.stop):
            block = self._add(deltas, factors, start, stop, done)
            if scale != 1.0:
                np.multiply(block, scale, out=block)
            found += squares(block)
            if finish is not None:
                finish(start, stop)
        return found

    def _close_rows(
        self,
        t: int,
        slot: Slot,
        deltas: Sequence[Vector],
        shares: Sequence[float],
        done: int,
        scale: float,
        finish: Finish | None,
    ) -> float:
        """RDA of each row of a tensor; the sum of its squares."""
        found, columns = 0.0, _columns(slot)
        for start, stop in _row_blocks(slot):
            first, last = (start - slot.start) // columns, (stop - slot.start) // columns
            rows = self._rows[t].part(first, last) if done else _Rows.zero(last - first, columns)
            rows.add([delta[start:stop].reshape(-1, columns) for delta in deltas], shares)
            rows.merged(scale, self._out[start:stop].reshape(-1, columns))
            for block_start, block_stop in _blocks(start, stop):
                found += squares(self._out[block_start:block_stop])
                if finish is not None:
                    finish(block_start, block_stop)
        return found


def merge(
    layout: FragmentLayout,
    deltas: Sequence[Vector],
    norms: Sequence[Float64],
    shares: Sequence[float],
    out: Float32,
    recorded: Float64 | None = None,
    finish: Finish | None = None,
) -> Reduced:
    """Merge deltas of one fragment into its pseudogradient, each tensor by its rule (paper, RDA).

    "mean" is the weighted mean. "rda" is the weighted mean length times the direction of the weighted mean of
    directions: it keeps the length that one learner's delta has, however many nearly orthogonal ones there are.
    "rda-row" is the same for each row of a matrix (all but its first dimension). Directions that cancel give 0. One
    contribution comes out as it went in, whatever the rule.

    Args:
        layout: the fragment's tensors.
        deltas: each (elements,), finite, in any codec.
        norms: `delta_norms` of each.
        shares: `merge_shares` of all, or any other multiple of the merge weights that is not too large.
        out: (elements,) float32, overwritten with the pseudogradient.
        recorded: directions of an earlier merge to scale by, instead of those measured here; for a replay.
        finish: called with (start, stop) of each block of `out` once it is what it will be, from front to back; it is
            in the cache then, and may be overwritten.
    """
    return Sum(layout, out).close(deltas, norms, shares, recorded, finish)
