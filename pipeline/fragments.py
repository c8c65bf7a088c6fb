"""The layout of a model: which tensor is in which fragment, and where in the fragment's flat vector it lies. Pure.

Balanced tensor fragmentation (paper, fragments) assigns whole tensors, largest first, each to the fragment that is
smallest so far (LPT, peak within 4/3 of the optimum). Tensors that are merged by rows and too large for that are cut
(our addition, docs/explanation/merge.md). Average-only tensors (buffers) have the last fragment to themselves.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import SyncSpec, TensorSpec
from diloco.pipeline.messages.wire import AVERAGED, MergeName, MergeRule
from diloco.pipeline.payload.codec import digest_of

K = TypeVar("K")
# A tensor of up to this many mean fragments is left whole.
LEVEL = 1.1


def merge_rule(merge: MergeName, embedding: bool, dims: int) -> MergeRule:
    """Return how a run merges a trained tensor with `dims` dimensions. Embeddings always use the mean (paper, merging).

    A row of an embedding changes only where its token occurs, and the direction of a row that hardly changed is noise.
    An output head that is tied to an embedding is the same tensor. In an untied head every row gets a gradient at every
    step, like the rows of any matrix.
    """
    if merge == "mean" or embedding:
        return "mean"
    return "rda-row" if merge == "rda-row" and dims > 1 else "rda"


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor, or of some of its rows, in its fragment's flat vector: elements [start, stop)."""

    tensor: TensorSpec
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The tensor's name, with the rows if this is a part of it (`TensorSpec.part`)."""
        return self.tensor.part

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part that lies here."""
        return self.tensor.held

    @property
    def within(self) -> slice:
        """The slot's elements as a slice of the whole flattened tensor."""
        first = 0 if self.tensor.rows is None else self.tensor.rows[0] * math.prod(self.tensor.shape[1:])
        return slice(first, first + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """The tensors of one fragment, in the order in which they are concatenated."""

    id: int
    slots: tuple[Slot, ...]
    averaged: bool = field(init=False)
    """True if its tensors are average-only. In a spec's layout either all tensors of a fragment are, or none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "averaged", any(slot.tensor.rule in AVERAGED for slot in self.slots))

    @property
    def elements(self) -> int:
        """Length of the flat vector."""
        return self.slots[-1].stop if self.slots else 0

    def sync(self, run: SyncSpec) -> SyncSpec:
        """Return the run's settings with the changes that apply to this fragment.

        Average-only tensors are exact in both directions, because a variance of a few thousandths may lie next to one
        of thousands. Their outer step goes all the way to the mean.
        """
        if not self.averaged:
            return run
        exact = {"codec": "fp32", "global_codec": "fp32"}
        return run.model_copy(update=exact | {"outer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.0})


@dataclass(frozen=True, slots=True)
class Layout:
    """All fragments of a model."""

    fragments: tuple[FragmentLayout, ...]
    digest: bytes
    """Digest of the tensor table; every delta's header has it."""
    elements: int = field(init=False)
    """Elements of the whole model."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", sum(f.elements for f in self.fragments))

    def whole(self, flats: Iterable[npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
        """Return every whole tensor by name, in its own shape.

        flats: one vector (elements,) per fragment. A tensor that lies in a single fragment shares the vector's memory.
        """
        found: dict[str, npt.NDArray[np.float32]] = {}
        for fragment, flat in zip(self.fragments, flats, strict=True):
            for slot in fragment.slots:
                tensor, values = slot.tensor, flat[slot.start : slot.stop]
                if tensor.rows is None:
                    found[tensor.name] = values.reshape(tensor.shape)
                    continue
                if tensor.name not in found:
                    found[tensor.name] = np.empty(tensor.shape, np.float32)
                found[tensor.name].reshape(-1)[slot.within] = values
        return found

    def only(self, names: Iterable[str]) -> "Layout":
        """Return the same fragments with only these tensors, one after another; a fragment may be left without any."""
        kept = set(names)
        fragments = []
        for fragment in self.fragments:
            tensors = [slot.tensor for slot in fragment.slots if slot.tensor.name in kept]
            fragments.append(FragmentLayout(fragment.id, _in_a_row(tensors)))
        return Layout(tuple(fragments), self.digest)

    @property
    def trained(self) -> "Layout":
        """The layout without the average-only fragment, which is the last; the digest stays the same."""
        return Layout(tuple(fragment for fragment in self.fragments if not fragment.averaged), self.digest)


def fragments_of(wanted: int, tensors: int, averaged: int = 0) -> int:
    """Return the number of fragments for a model whose user gave none: as many as wanted, at most one per tensor.

    Args:
        wanted: the usual number.
        tensors: number of trained tensors.
        averaged: number of average-only tensors.
    """
    return min(max(wanted, 1 + bool(averaged)), tensors + bool(averaged))


def balance(sizes: Iterable[tuple[str, int]], fragments: int, averaged: Collection[str] = ()) -> dict[str, int]:
    """Assign tensors (name, elements) to fragments 0..fragments-1: largest first, each to the smallest fragment so far.

    Ties are broken by name and by fragment id, so that every learner computes the same layout.

    averaged: names of the average-only tensors. If there are any, they have the last fragment to themselves.

    Raises:
        UsageError: there are fewer tensors than fragments, or no fragment is left for the trained ones.
    """
    ordered, left = _largest_first(sizes), fragments - bool(averaged)
    if not 0 < left <= len(ordered):
        what = f"{len(ordered)} trained tensors, and each fragment needs at least one"
        if averaged:
            what = f"{what}, except the last, which holds the {len(averaged)} averaged buffers"
        fitting = len(ordered) + bool(averaged) if left > 0 else 2
        raise UsageError(
            f"fragments={fragments}, but the model has {what}: set fragments={fitting} (--fragments, "
            "DILOCO_FRAGMENTS, or sync=SyncSettings(fragments=...))"
        )
    return dict.fromkeys(averaged, left) | spread(ordered, left)


def _largest_first(sizes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Sort by size, and by name where sizes are equal."""
    return sorted(sizes, key=lambda item: (-item[1], item[0]))


def spread(ordered: Iterable[tuple[K, int]], bins: int) -> dict[K, int]:
    """Assign each of these, of which the size is given, to the bin that is smallest so far."""
    load, chosen = [0] * bins, {}
    for name, size in ordered:
        smallest = min(range(bins), key=lambda p: (load[p], p))
        load[smallest] += size
        chosen[name] = smallest
    return chosen


def level(tensors: Iterable[TensorSpec], heads: Collection[str] = ()) -> tuple[TensorSpec, ...]:
    """Return a balanced table whose fragments are as equal in size as its tensors allow.

    If a tensor that is merged by rows is too large for a fragment (`LEVEL`), all such tensors are distributed over the
    fragments to one level, and cut at the nearest row. The others stay whole, because their norms and orthogonalised
    steps need all of the tensor. If this makes no improvement, the table is returned unchanged.

    heads: names of tensors that are merged by rows if they are too large: without orthogonalisation, and with RDA per
    row.
    """
    table = tuple(tensors)
    before = _loads(table)
    most = LEVEL * sum(before) / len(before)
    loose = [_by_rows(t) if t.name in heads and t.elements > most and t.rule in _OF_ROWS else t for t in table]
    poured = {tensor.name: tensor.elements for tensor in loose if tensor.by_rows and tensor.elements}
    if max(poured.values(), default=0) <= most:
        return table
    kept = {t.name: t.elements for t in loose if t.name not in poured and t.rule not in AVERAGED}
    chosen, load = spread(_largest_first(kept.items()), len(before)), [0] * len(before)
    for name, size in kept.items():
        load[chosen[name]] += size
    ends = [0, *accumulate(_room(load, sum(poured.values())))]
    begins, begin = dict[str, int](), 0
    for name, size in _largest_first(poured.items()):
        begins[name], begin = begin, begin + size
    cut: list[TensorSpec] = []
    for tensor in loose:
        if tensor.name in begins:
            cut += _cut(tensor, [end - begins[tensor.name] for end in ends])
        else:
            cut.append(tensor.model_copy(update={"fragment": chosen.get(tensor.name, tensor.fragment)}))
    after = _loads(cut)
    return tuple(cut) if len(after) == len(before) and max(after) < max(before) else table


# The rule that replaces a tensor's rule when its rows are merged independently.
_OF_ROWS: dict[MergeRule, MergeRule] = {"mean": "mean", "rda": "rda-row", "rda-row": "rda-row"}


def _by_rows(tensor: TensorSpec) -> TensorSpec:
    return tensor.model_copy(update={"rule": _OF_ROWS[tensor.rule], "matrix": False})


def _loads(tensors: Iterable[TensorSpec]) -> list[int]:
    """Return the elements of each fragment that has trained tensors."""
    load: dict[int, int] = {}
    for tensor in tensors:
        if tensor.rule not in AVERAGED:
            load[tensor.fragment] = load.get(tensor.fragment, 0) + tensor.elements
    return list(load.values())


def _room(load: Sequence[int], elements: int) -> list[int]:
    """Distribute `elements` over fragments so that all reach the same level; fragments already above it get none."""
    full = 0
    for count, below in enumerate(accumulate(sorted(load)), 1):
        full = -(-(below + elements) // count)
        if count == len(load) or full <= sorted(load)[count]:
            break
    return [max(0, full - own) for own in load]


def _cut(tensor: TensorSpec, ends: Sequence[int]) -> Iterator[TensorSpec]:
    """Split a tensor by rows: those between the elements ends[p] and ends[p + 1] go to fragment p."""
    rows, row = tensor.shape[0], math.prod(tensor.shape[1:])
    cuts = [min(max((end + row // 2) // row, 0), rows) for end in ends]
    for p, (first, last) in enumerate(pairwise(cuts)):
        if first < last:
            update = {"fragment": p, "rows": None if last - first == rows else (first, last)}
            yield tensor.model_copy(update=update)


def layout_of(tensors: Iterable[TensorSpec]) -> Layout:
    """Return the layout of a spec's tensor table. Within a fragment, tensors keep the table's order."""
    table = tuple(tensors)
    members: dict[int, list[TensorSpec]] = {}
    for tensor in table:
        members.setdefault(tensor.fragment, []).append(tensor)
    described = msgpack.packb([(t.name, t.shape, t.dtype, t.rule, t.fragment, t.matrix, t.rows) for t in table])
    fragments = tuple(FragmentLayout(p, _in_a_row(members[p])) for p in sorted(members))
    return Layout(fragments, digest_of(described))


def _in_a_row(tensors: Iterable[TensorSpec]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for tensor in tensors:
        start = slots[-1].stop if slots else 0
        slots.append(Slot(tensor, start, start + tensor.elements))
    return tuple(slots)
