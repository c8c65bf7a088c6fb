"""Fast implementation of `algorithm.pseudogradient` (paper, RDA), in float32 and in blocks. Pure numpy.

The norms of deltas are measured here too, block by block while they come in.

A merge rule is a class here with a line in `RULES`. In addition, `algorithm` has a plain function with a line in
`MERGE_RULES`, which defines the rule, and `wire` has its name. `test_algorithm.py` reports which part of a new rule is
missing, and compares its class with its function.

Blocks of 128k elements stay in the CPU cache between conversion, multiplication and addition, which is three times as
fast as whole-array numpy. Deltas are summed in the order of the given list, so equal inputs give equal bits, however
many of them were summed (`Sum.add`) before the last one arrived.

`replay` has to repeat a merge bit for bit, so two kinds of work are kept apart. Elementwise work consists of single
float32 operations in a given order, which give the same bits on every machine. So do numpy's sums over a row (its
length), in numpy's own order (`test_merge.py` checks that). Any other reduction (a tensor's length) sums in an order
that the machine's libraries choose, and agrees only to about 1e-7. Such reductions enter the elementwise work as scalar
factors, so a merge can be repeated from recorded factors.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from diloco.pipeline.fragments import FragmentLayout, Slot
from diloco.pipeline.messages.wire import MergeRule, WeightsName
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Vector
from diloco.syncer.algorithm import CANCELLED, WEIGHTS, counted

# Elements handled at a time, so that they stay in the CPU cache.
BLOCK = 128 * 1024

# Elements handled at a time where norms are measured, which needs only one array in the cache.
NORM_BLOCK = 2 * BLOCK

# Squares of this many elements are summed in float32, and the sums in float64: rounding stays below 3e-7 at any size.
ROW = 1024

# Outside these bounds a float32 sum of squares may have lost small elements or overflowed on large ones.
_SAFE_SQUARES = (1e-30, 1e30)

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# A delta shorter than this has no direction: in bf16 and float32 it is rounding noise.
_NO_DIRECTION = 1e-30

# Elements of whole rows that are merged at a time in float64, so that a few such arrays stay in the cache.
ROWS_BLOCK = 32 * 1024

# No contribution is multiplied by more than this (over its length), or the sum might leave float32's range.
MAX_SHARE = 2.0**20

# Called with (start, stop) of each block of the pseudogradient once it is final, from front to back. The block is in
# the cache then, and the callee may overwrite it.
EachBlock = Callable[[int, int], None]


# --- lengths of deltas -------------------------------------------------------------------------------------


def all_finite(values: Float32) -> bool:
    """Return whether a vector (elements,) has no NaN and no infinity."""
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(values.min(initial=0.0)) and np.isfinite(values.max(initial=0.0)))


def squares(block: Float32) -> float:
    """Return the sum of squares of one block; it is not finite if an element is not."""
    whole = len(block) - len(block) % ROW
    rows, rest = block[:whole].reshape(-1, ROW), block[whole:]
    quick = float(np.vecdot(rows, rows).sum(dtype=np.float64)) + float(np.dot(rest, rest))
    if _SAFE_SQUARES[0] < quick < _SAFE_SQUARES[1]:
        return quick
    wide = block.astype(np.float64)
    return float(np.dot(wide, wide))


class DeltaNorms:
    """L2 norms of the tensors of a delta that arrives from front to back; each block is summed once it is whole.

    A tensor with a NaN or an infinity has a non-finite norm. How the delta is cut into chunks does not change any sum.
    """

    def __init__(self, layout: FragmentLayout) -> None:
        self._slots = layout.slots
        self._squares = np.zeros(len(layout.slots), np.float64)
        self._tensor = self._at = 0
        self._block = min(NORM_BLOCK, layout.elements)

    def advance(self, delta: Vector) -> None:
        """Sum the blocks that are whole now; delta is all that has arrived, from the first element on, in any codec."""
        # Deltas that arrive at the same time share this pooled memory, so it is in the CPU cache.
        scratch = pooled(self._block, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            while self._tensor < len(self._slots):
                slot = self._slots[self._tensor]
                start, stop = self._at, min(self._at + NORM_BLOCK, slot.stop)
                if stop > len(delta):
                    return
                if start < stop:
                    block = scratch[: stop - start]
                    np.copyto(block, delta[start:stop])
                    self._squares[self._tensor] += squares(block)
                self._at = stop
                self._tensor += stop == slot.stop

    def norms(self) -> Float64:
        """Return the norms (tensors,), once the whole delta has passed through `advance`."""
        with np.errstate(invalid="ignore"):
            found: Float64 = np.sqrt(self._squares)
        return found


def delta_norms(layout: FragmentLayout, delta: Vector) -> Float64:
    """Return the L2 norms (tensors,) of the tensors of a whole delta (elements,); see `DeltaNorms`."""
    norms = DeltaNorms(layout)
    norms.advance(delta)
    return norms.norms()


# --- stale deltas ---------------------------------------------------------------------------------------


def rebase(layout: FragmentLayout, delta: Vector, theta: Float32, before: Float32) -> tuple[Float32, Float64]:
    """Return `algorithm.rebased` in new memory (elements,), and its `delta_norms`.

    It computes theta - before and then adds delta: single float32 operations, so the same bits on every machine.

    Args:
        delta: (elements,) from the version before, in any codec.
        theta, before: (elements,) values of the current version and of the one before.
    """
    found, scratch = pooled(layout.elements, np.float32), np.empty(min(BLOCK, layout.elements), np.float32)
    norms = DeltaNorms(layout)
    for start, stop in _blocks(0, layout.elements):
        block, term = found[start:stop], scratch[: stop - start]
        np.copyto(term, delta[start:stop])
        np.subtract(theta[start:stop], before[start:stop], out=block)
        np.add(block, term, out=block)
        norms.advance(found[:stop])
    return found, norms.norms()


# --- merge weights --------------------------------------------------------------------------------------


def merge_shares(
    counters: Sequence[tuple[int, int]], rule: WeightsName = "tokens", *, interval: int
) -> tuple[float, ...]:
    """Return `algorithm.merge_weights` without the common factor, which is known only once all contributions are in.

    Shares are relative to the first contribution's, which is 1, so those of the first few are known before the others
    arrive. If the largest would exceed `MAX_SHARE`, they are relative to the largest. Single float64 operations: the
    same bits on every machine.
    """
    raw = [WEIGHTS[rule](steps, tokens) for steps, tokens in counted(counters, interval)]
    of = raw[0] if max(raw) <= MAX_SHARE * raw[0] else max(raw)
    return tuple(one / of for one in raw)


# --- merge rules ------------------------------------------------------------------------------------------


class Contributions(NamedTuple):
    """Contributions to a fragment, in the order in which they are summed."""

    deltas: Sequence[Vector]
    """Each (elements,), finite, in any codec."""
    norms: Sequence[Float64]
    """`delta_norms` of each, (tensors,)."""
    shares: Sequence[float]
    """`merge_shares` of each, or any other multiple of the merge weights that is not too large."""
    factors: Sequence[float]
    """`algorithm.clip_factors` of each: it is merged as if it were this many times as long; 1 for a single one."""

    def part(self, piece: slice) -> "Contributions":
        """Return some of them."""
        return Contributions(self.deltas[piece], self.norms[piece], self.shares[piece], self.factors[piece])


class TensorStats(NamedTuple):
    """Measurements of one tensor's pseudogradient, taken while it is made."""

    squares: float
    """Sum of the squares of its elements."""
    direction: float = 0.0
    """L2 norm of the weighted mean of directions; 0 if the rule does not merge whole tensors by direction."""


class Rule(ABC):
    """Merges contributions to one tensor: they are added as they arrive, the last ones when the tensor is closed."""

    def __init__(self, tensor: int, slot: Slot, out: Float32, scratch: Float32) -> None:
        """Merge into out[slot.start : slot.stop]; scratch (block,) is shared by all rules, which run one at a time."""
        self._tensor, self._slot, self._out, self._scratch = tensor, slot, out, scratch

    @abstractmethod
    def add(self, more: Contributions) -> None:
        """Add these contributions to the sum."""

    @abstractmethod
    def close(self, rest: Contributions, scale: float, recorded: float | None, each_block: EachBlock) -> TensorStats:
        """Add the rest and make the pseudogradient.

        Args:
            rest: contributions that were not added yet; may be empty.
            scale: 1 / sum of all shares.
            recorded: `TensorStats.direction` of an earlier merge to scale by, instead of the one measured here.
            each_block: called for each block (see `EachBlock`).
        """


class Mean(Rule):
    """Merges by `algorithm.mean`: the sum of factor * delta in float32, in the tensor's part of the output."""

    _count = 0

    @override
    def add(self, more: Contributions) -> None:
        for _ in self._added(more):
            pass

    @override
    def close(self, rest: Contributions, scale: float, recorded: float | None, each_block: EachBlock) -> TensorStats:
        found = 0.0
        for start, stop, block in self._added(rest):
            if scale != 1.0:
                np.multiply(block, scale, out=block)
            found += squares(block)
            each_block(start, stop)
        return TensorStats(found)

    def _factors(self, more: Contributions) -> list[float]:
        return list(map(mul, more.shares, more.factors))

    def _added(self, more: Contributions) -> Iterator[tuple[int, int, Float32]]:
        """Add these block by block; yield (start, stop) and the block, each once all of them are in it."""
        begun, factors = self._count, self._factors(more)
        self._count += len(factors)
        for start, stop in _blocks(self._slot.start, self._slot.stop):
            block, term = self._out[start:stop], self._scratch[: stop - start]
            for number, (delta, factor) in enumerate(zip(more.deltas, factors, strict=True), begun):
                part, into = delta[start:stop], term if number else block
                if part.dtype != np.float32:
                    np.copyto(into, part)
                    part = into
                if factor != 1.0 or (part is not into and not number):
                    np.multiply(part, factor, out=into)
                    part = into
                if number:
                    np.add(block, part, out=block)
            yield start, stop, block


class Rda(Mean):
    """Merges by `algorithm.rda`: sums directions."""

    def __init__(self, tensor: int, slot: Slot, out: Float32, scratch: Float32) -> None:
        super().__init__(tensor, slot, out, scratch)
        self._lengths: list[float] = []

    @override
    def close(self, rest: Contributions, scale: float, recorded: float | None, each_block: EachBlock) -> TensorStats:
        # Two passes: the length of the mean direction, by which a block is scaled, is known after the first.
        found = 0.0
        for *_, block in self._added(rest):
            found += squares(block)
        measured = scale * math.sqrt(found)
        direction = measured if recorded is None else recorded
        length = scale * math.fsum(self._lengths)
        factor = scale * (length / direction) if direction > CANCELLED else 0.0
        for start, stop in _blocks(self._slot.start, self._slot.stop):
            np.multiply(self._out[start:stop], factor, out=self._out[start:stop])
            each_block(start, stop)
        return TensorStats(found * factor * factor, measured)

    @override
    def _factors(self, more: Contributions) -> list[float]:
        both = [(share, float(norms[self._tensor])) for share, norms in zip(more.shares, more.norms, strict=True)]
        self._lengths += [share * length * factor for (share, length), factor in zip(both, more.factors, strict=True)]
        return [share / length if length > _NO_DIRECTION else 0.0 for share, length in both]


class RdaRow(Rule):
    """Merges by `algorithm.rda_row`, with sums in float64: short rows nearly cancel far more often than tensors do."""

    def __init__(self, tensor: int, slot: Slot, out: Float32, scratch: Float32) -> None:
        super().__init__(tensor, slot, out, scratch)
        self._columns = (slot.stop - slot.start) // (slot.shape[0] if slot.shape else 1)
        self._rows: _Rows | None = None

    @override
    def add(self, more: Contributions) -> None:
        if self._rows is None:
            self._rows = _Rows.zero((self._slot.stop - self._slot.start) // self._columns, self._columns)
        for start, stop in self._row_blocks():
            self._add(more, self._rows.part(*self._numbers(start, stop)), start, stop)

    @override
    def close(self, rest: Contributions, scale: float, recorded: float | None, each_block: EachBlock) -> TensorStats:
        found = 0.0
        for start, stop in self._row_blocks():
            first, last = self._numbers(start, stop)
            rows = _Rows.zero(last - first, self._columns) if self._rows is None else self._rows.part(first, last)
            self._add(rest, rows, start, stop)
            rows.merged(scale, self._out[start:stop].reshape(-1, self._columns))
            for block_start, block_stop in _blocks(start, stop):
                found += squares(self._out[block_start:block_stop])
                each_block(block_start, block_stop)
        return TensorStats(found)

    def _row_blocks(self) -> Iterator[tuple[int, int]]:
        """Return (start, stop) of blocks of whole rows, in elements."""
        return _blocks(self._slot.start, self._slot.stop, self._columns * max(1, ROWS_BLOCK // self._columns))

    def _numbers(self, start: int, stop: int) -> tuple[int, int]:
        """Return the row numbers [first, last) of the elements [start, stop)."""
        return (start - self._slot.start) // self._columns, (stop - self._slot.start) // self._columns

    def _add(self, more: Contributions, rows: "_Rows", start: int, stop: int) -> None:
        rows.add([delta[start:stop].reshape(-1, self._columns) for delta in more.deltas], more)


class _Rows(NamedTuple):
    """Sums over the contributions to a tensor's rows, in float64."""

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
        """Return rows [start, stop), sharing memory."""
        return _Rows(self.directions[start:stop], self.lengths[start:stop])

    def add(self, parts: Sequence[Float32], of: Contributions) -> None:
        """Add parts of the deltas, each (rows, columns)."""
        for part, share, factor in zip(parts, of.shares, of.factors, strict=True):
            rows = part.astype(np.float64)
            lengths = _row_lengths(rows)
            np.add(self.lengths, share * factor * lengths, out=self.lengths)
            rows *= np.divide(share, lengths, out=np.zeros_like(lengths), where=lengths > _NO_DIRECTION)[:, None]
            np.add(self.directions, rows, out=self.directions)

    def merged(self, scale: float, out: Float32) -> None:
        """Write each row's mean length times the direction of its mean direction to out (rows, columns), float32."""
        size = scale * _row_lengths(self.directions)
        factors = np.divide(scale * scale * self.lengths, size, out=np.zeros_like(size), where=size > CANCELLED)
        np.multiply(self.directions, factors[:, None], out=out, casting="same_kind")


RULES: dict[MergeRule, type[Rule]]
RULES = {"mean": Mean, "rda": Rda, "rda-row": RdaRow, "average": Mean, "variance": Mean}


def _blocks(start: int, stop: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    return ((at, min(at + size, stop)) for at in range(start, stop, size))


def _row_lengths(rows: Float64) -> Float64:
    """Return the L2 norms (rows,) of rows (rows, columns), with the same bits on every machine."""
    lengths: Float64 = np.sqrt(np.add.reduce(np.square(rows), axis=1))
    return lengths


# --- the merge of a fragment ------------------------------------------------------------------------------


class Reduced(NamedTuple):
    """Measurements of a fragment's merge."""

    norm: float
    """L2 norm of the pseudogradient."""
    directions: Float64
    """(tensors,): `TensorStats.direction` of each tensor."""


class Sum:
    """Sum of contributions to one fragment's pseudogradient, extended as they arrive; `close` adds the last ones.

    It makes no difference to any bit which contributions were added before `close` and which by it. A single
    contribution comes out unchanged, whatever the rule. Directions that cancel give 0.
    """

    def __init__(self, layout: FragmentLayout) -> None:
        self.layout = layout
        self.values: Float32 = pooled(layout.elements, np.float32)
        """(elements,): the sum so far, in the end the pseudogradient; not set before the first contribution."""
        self._slots = {t: slot for t, slot in enumerate(layout.slots) if slot.start < slot.stop}
        self._scratch = np.empty(min(BLOCK, layout.elements), np.float32)
        kept = self.values, self._scratch
        self._rules = {t: RULES[slot.tensor.rule](t, slot, *kept) for t, slot in self._slots.items()}
        self.count = 0
        """How many contributions were added."""

    def add(self, more: Contributions) -> None:
        """Add these contributions to the sum."""
        for rule in self._rules.values():
            rule.add(more)
        self.count += len(more.deltas)

    def close(
        self,
        contributions: Contributions,
        recorded: Float64 | None = None,
        each_block: EachBlock = lambda start, stop: None,
    ) -> Reduced:
        """Make the pseudogradient of all contributions; the first `count` are in the sum already.

        Args:
            recorded: (tensors,) directions of an earlier merge to scale by (for a replay); None: as measured here.
        """
        alone = len(contributions.deltas) == 1
        rest = contributions._replace(shares=[1.0]) if alone else contributions.part(slice(self.count, None))
        scale = 1.0 if alone else 1 / math.fsum(contributions.shares)
        total, directions = 0.0, np.zeros(len(self.layout.slots), np.float64)
        for t, slot in self._slots.items():
            rule = Mean(t, slot, self.values, self._scratch) if alone else self._rules[t]
            told = None if recorded is None else float(recorded[t])
            squared, directions[t] = rule.close(rest, scale, told, each_block)
            total += squared
        return Reduced(math.sqrt(total), directions)
