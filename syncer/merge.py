"""The merge: contributions to one pseudogradient (paper, RDA). Pure numpy, one pass over memory in blocks.

Blocks of 128k elements stay in the cache between conversion, multiplication and addition; that is three times
the speed of whole-array numpy. Sums run in the order of the given list, so equal inputs give equal bits.

Two kinds of work, for the sake of `replay`. Elementwise work is single float32 operations in a given order: the same
bits on every machine, and so are sums of one element after the other (a row's length). Any other reduction (a tensor's
length) sums in an order that the machine's libraries choose: the same to about 1e-7. Such reductions enter the
elementwise work as factors, so a merge can be repeated bit for bit from recorded ones.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.codec import Vector
from pipeline.fragments import FragmentLayout

BLOCK = 128 * 1024
"""Elements worked on at a time."""

ROW = 1024
"""Squares of this many elements are summed in float32, the rows in float64: rounding stays below 3e-7 at any size."""

_NO_DIRECTION = 1e-30
"""A delta shorter than this has no direction: in bf16 and float32 it is rounding noise."""

_CANCELLED = 1e-6
"""Unit vectors whose weighted mean is shorter than this cancel: what is left is rounding noise."""

_SAFE_SQUARES = (1e-30, 1e30)
"""Outside of this a float32 sum of squares may have lost small or overflowed on large elements."""

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


class Reduced(NamedTuple):
    """What a merge measured on its way."""

    norm: float
    """L2 norm of the pseudogradient."""
    directions: Float64
    """(tensors,) L2 norm of each tensor's weighted sum of directions; 0 where it is not merged by its direction."""


def merge_weights(counters: Sequence[tuple[int, int]], rule: Literal["tokens", "equal"] = "tokens") -> Float64:
    """Merge weights (contributions,) from (steps, tokens) since the base, both positive.

    By "tokens" w = tokens * (tokens / steps), quantity times quality, normalised to sum 1 (paper, token weights); by
    "equal" each the same.
    """
    if rule == "equal":
        return np.full(len(counters), 1 / len(counters))
    raw = np.array([tokens * (tokens / steps) for steps, tokens in counters], np.float64)
    weights: Float64 = raw / raw.sum()
    return weights


def _squares(block: Float32) -> float:
    """Sum of squares of one block; non-finite if an element is."""
    whole = len(block) - len(block) % ROW
    rows, rest = block[:whole].reshape(-1, ROW), block[whole:]
    quick = float(np.vecdot(rows, rows).sum(dtype=np.float64)) + float(np.dot(rest, rest))
    if _SAFE_SQUARES[0] < quick < _SAFE_SQUARES[1]:
        return quick
    wide = block.astype(np.float64)
    return float(np.dot(wide, wide))


class DeltaNorms:
    """L2 norm of each tensor of a delta that comes from front to back: each block is looked at as soon as it is whole.

    A tensor with a NaN or an infinity has a non-finite norm. What comes at a time does not change any sum.
    """

    def __init__(self, layout: FragmentLayout) -> None:
        self._slots = layout.slots
        self._squares = np.zeros(len(layout.slots), np.float64)
        self._tensor = self._at = 0
        self._scratch = np.empty(BLOCK, np.float32)

    def advance(self, delta: Vector) -> None:
        """delta: what is here by now, from the first element on, in any codec."""
        with np.errstate(over="ignore", invalid="ignore"):
            while self._tensor < len(self._slots):
                slot = self._slots[self._tensor]
                start, stop = self._at, min(self._at + BLOCK, slot.stop)
                if stop > len(delta):
                    return
                if start < stop:
                    block = self._scratch[: stop - start]
                    np.copyto(block, delta[start:stop])
                    self._squares[self._tensor] += _squares(block)
                self._at = stop
                self._tensor += stop == slot.stop

    def norms(self) -> Float64:
        """(tensors,), once all of the delta was here."""
        with np.errstate(invalid="ignore"):
            found: Float64 = np.sqrt(self._squares)
        return found


def delta_norms(layout: FragmentLayout, delta: Vector) -> Float64:
    """L2 norm (tensors,) of each tensor of a whole delta (elements,); see `DeltaNorms`."""
    norms = DeltaNorms(layout)
    norms.advance(delta)
    return norms.norms()


def _sum(deltas: Sequence[Array], factors: Sequence[float], out: Float32, scratch: Float32) -> None:
    """out (block,) = sum of factor * delta (block,), in float32 and in the order given."""
    np.copyto(out, deltas[0])
    np.multiply(out, factors[0], out=out)
    term = scratch[: len(out)]
    for delta, factor in zip(deltas[1:], factors[1:], strict=True):
        np.copyto(term, delta)
        np.multiply(term, factor, out=term)
        np.add(out, term, out=out)


def _row_lengths(rows: Float64) -> Float64:
    """L2 norm (rows,) of rows (rows, columns), summed from left to right: the same bits on every machine."""
    lengths: Float64 = np.sqrt(np.add.accumulate(np.square(rows), axis=1)[:, -1])
    return lengths


def _merge_rows(parts: Sequence[Array], weights: Float64, out: Float32) -> None:
    """RDA of each row: parts and out (rows, columns). In float64, since short rows nearly cancel far oftener."""
    merged = np.zeros(out.shape, np.float64)
    mean = np.zeros(len(out), np.float64)
    for part, weight in zip(parts, weights, strict=True):
        rows = part.astype(np.float64)
        lengths = _row_lengths(rows)
        mean += weight * lengths
        merged += rows * np.divide(weight, lengths, out=np.zeros_like(lengths), where=lengths > _NO_DIRECTION)[:, None]
    directions = _row_lengths(merged)
    merged *= np.divide(mean, directions, out=np.zeros_like(mean), where=directions > _CANCELLED)[:, None]
    np.copyto(out, merged, casting="same_kind")


def merge(
    layout: FragmentLayout,
    deltas: Sequence[Vector],
    norms: Sequence[Float64],
    weights: Float64,
    out: Float32,
    recorded: Float64 | None = None,
    finish: Callable[[int, int], None] | None = None,
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
        weights: (contributions,), sum 1.
        out: (elements,) float32, overwritten with the pseudogradient.
        recorded: directions of an earlier merge to scale by, instead of those measured here; for a replay.
        finish: called with (start, stop) of each block of `out` once it is what it will be, from front to back; it is
            in the cache then, and may be overwritten.
    """
    scratch = np.empty(BLOCK, np.float32)
    total = 0.0
    directions = np.zeros(len(layout.slots), np.float64)
    for t, slot in enumerate(layout.slots):
        if slot.tensor.rule == "rda-row" and len(deltas) > 1 and slot.stop > slot.start:
            columns = (slot.stop - slot.start) // (slot.tensor.shape[0] if slot.tensor.shape else 1)
            at_once = columns * max(1, BLOCK // columns)
            for start in range(slot.start, slot.stop, at_once):
                stop = min(start + at_once, slot.stop)
                rows = [delta[start:stop].reshape(-1, columns) for delta in deltas]
                _merge_rows(rows, weights, out[start:stop].reshape(-1, columns))
            total += _squares(out[slot.start : slot.stop])
            if finish is not None:
                for start in range(slot.start, slot.stop, BLOCK):
                    finish(start, min(start + BLOCK, slot.stop))
            continue
        lengths = [float(of_delta[t]) for of_delta in norms]
        by_direction = slot.tensor.rule == "rda" and len(deltas) > 1
        factors = [
            (float(w) / length if length > _NO_DIRECTION else 0.0) if by_direction else float(w)
            for w, length in zip(weights, lengths, strict=True)
        ]
        squares, factor = 0.0, 1.0
        for start in range(slot.start, slot.stop, BLOCK):
            stop = min(start + BLOCK, slot.stop)
            block = out[start:stop]
            _sum([delta[start:stop] for delta in deltas], factors, block, scratch)
            squares += _squares(block)
        if by_direction:
            directions[t] = math.sqrt(squares)
            direction = float(directions[t] if recorded is None else recorded[t])
            mean_length = math.fsum(float(w) * length for w, length in zip(weights, lengths, strict=True))
            factor = mean_length / direction if direction > _CANCELLED else 0.0
            squares *= factor * factor
        total += squares
        for start in range(slot.start, slot.stop, BLOCK):
            stop = min(start + BLOCK, slot.stop)
            block = out[start:stop]
            if by_direction:
                np.multiply(block, factor, out=block)
            if finish is not None:
                finish(start, stop)
    return Reduced(math.sqrt(total), directions)
