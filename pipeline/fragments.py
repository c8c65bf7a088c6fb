"""The layout: which tensor belongs to which fragment, and where in the fragment's flat vector it lies.

Balanced tensor fragmentation (paper, fragments): whole tensors, largest first, each into the smallest
fragment so far (LPT, peak within 4/3 of the optimum). Average-only tensors, a model's buffers, have the last fragment
to themselves: what is never quantized or accelerated shares no payload with what is. Pure.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgpack

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import SyncSpec, TensorSpec
from diloco.pipeline.messages.wire import AVERAGED
from diloco.pipeline.payload.codec import digest_of


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's place in its fragment's flat vector: elements [start, stop)."""

    tensor: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """The tensors of one fragment, in the order in which they are concatenated."""

    id: int
    slots: tuple[Slot, ...]
    averaged: bool = field(init=False)
    """Its tensors are average-only; in a spec's layout all of them are, or none is."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "averaged", any(slot.tensor.rule in AVERAGED for slot in self.slots))

    @property
    def elements(self) -> int:
        """Length of the flat vector."""
        return self.slots[-1].stop if self.slots else 0

    def sync(self, run: SyncSpec) -> SyncSpec:
        """The constants that hold for this fragment, of a run's.

        Average-only tensors are exact both ways, since a variance of a few thousandths may lie beside one of thousands.
        Their outer step goes all the way to the mean.
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
    """Travels in every delta's header."""

    @property
    def elements(self) -> int:
        """Elements of the whole model."""
        return sum(f.elements for f in self.fragments)

    def only(self, names: Iterable[str]) -> "Layout":
        """The same fragments with these tensors alone, one after another; a fragment may have none."""
        kept = set(names)
        fragments = []
        for fragment in self.fragments:
            tensors = [slot.tensor for slot in fragment.slots if slot.tensor.name in kept]
            fragments.append(FragmentLayout(fragment.id, _in_a_row(tensors)))
        return Layout(tuple(fragments), self.digest)

    @property
    def trained(self) -> "Layout":
        """Without the average-only fragment, which is the last, and with the digest of all."""
        return Layout(tuple(fragment for fragment in self.fragments if not fragment.averaged), self.digest)


def fragments_of(wanted: int, tensors: int, averaged: int = 0) -> int:
    """How many fragments a model has of which nobody asked for a number: as many as wanted, one a tensor at most.

    tensors, averaged: trained and average-only ones.
    """
    return min(max(wanted, 1 + bool(averaged)), tensors + bool(averaged))


def balance(sizes: Iterable[tuple[str, int]], fragments: int, averaged: Collection[str] = ()) -> dict[str, int]:
    """Assign tensors (name, elements) to fragments 0..fragments-1: largest first, into the smallest so far.

    Ties go by name and by fragment id, so that every learner finds the same layout.

    Args:
        sizes: of the trained tensors.
        fragments: all there are.
        averaged: names of the average-only tensors; if there are any, they have the last fragment to themselves.

    Raises:
        UsageError: fewer tensors than fragments, or none is left for the trained ones.
    """
    ordered, left = sorted(sizes, key=lambda item: (-item[1], item[0])), fragments - bool(averaged)
    if not 0 < left <= len(ordered):
        what = f"{len(ordered)} trained tensors, and each fragment needs one"
        if averaged:
            what = f"{what}, but the last: that has the {len(averaged)} buffers, which are averaged"
        fitting = len(ordered) + bool(averaged) if left > 0 else 2
        raise UsageError(
            f"fragments={fragments}, but the model has {what}: "
            f"say fragments={fitting} (--fragments, DILOCO_FRAGMENTS, or sync=SyncSettings(fragments=...))"
        )
    load = [0] * left
    chosen = dict.fromkeys(averaged, left)
    for name, size in ordered:
        smallest = min(range(left), key=lambda p: (load[p], p))
        load[smallest] += size
        chosen[name] = smallest
    return chosen


def layout_of(tensors: Iterable[TensorSpec]) -> Layout:
    """Layout of a spec's tensor table: within a fragment, tensors keep the table's order."""
    table = tuple(tensors)
    members: dict[int, list[TensorSpec]] = {}
    for tensor in table:
        members.setdefault(tensor.fragment, []).append(tensor)
    # What is said of few tensors only is added to these, so that all others keep the digest that they always had.
    described = msgpack.packb([(t.name, t.shape, t.dtype, t.rule, t.fragment, *(t.matrix,) * t.matrix) for t in table])
    fragments = tuple(FragmentLayout(p, _in_a_row(members[p])) for p in sorted(members))
    return Layout(fragments, digest_of(described))


def _in_a_row(tensors: Iterable[TensorSpec]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for tensor in tensors:
        start = slots[-1].stop if slots else 0
        slots.append(Slot(tensor, start, start + tensor.elements))
    return tuple(slots)
