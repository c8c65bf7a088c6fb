"""The layout: which tensor belongs to which fragment, and where in the fragment's flat vector it lies.

Balanced tensor fragmentation (paper, fragments): whole tensors, largest first, each into the smallest
fragment so far (LPT, peak within 4/3 of the optimum). Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgpack

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import TensorSpec
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

    @property
    def elements(self) -> int:
        """Length of the flat vector."""
        return self.slots[-1].stop if self.slots else 0


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


def fragments_of(wanted: int, tensors: int) -> int:
    """How many fragments a model has of which nobody asked for a number: as many as wanted, one a tensor at most."""
    return min(wanted, tensors)


def balance(sizes: Iterable[tuple[str, int]], fragments: int) -> dict[str, int]:
    """Assign tensors (name, elements) to fragments 0..fragments-1: largest first, into the smallest so far.

    Ties go by name and by fragment id, so that every learner finds the same layout.

    Raises:
        UsageError: fewer tensors than fragments.
    """
    ordered = sorted(sizes, key=lambda item: (-item[1], item[0]))
    if len(ordered) < fragments:
        raise UsageError(
            f"fragments={fragments}, but the model has {len(ordered)} trained tensors, and each fragment needs one: "
            f"say fragments={len(ordered)} (--fragments, DILOCO_FRAGMENTS, or sync=SyncSettings(fragments=...))"
        )
    load = [0] * fragments
    chosen: dict[str, int] = {}
    for name, size in ordered:
        smallest = min(range(fragments), key=lambda p: (load[p], p))
        load[smallest] += size
        chosen[name] = smallest
    return chosen


def layout_of(tensors: Iterable[TensorSpec]) -> Layout:
    """Layout of a spec's tensor table: within a fragment, tensors keep the table's order."""
    table = tuple(tensors)
    members: dict[int, list[Slot]] = {}
    for tensor in table:
        slots = members.setdefault(tensor.fragment, [])
        start = slots[-1].stop if slots else 0
        slots.append(Slot(tensor, start, start + tensor.elements))
    # What is said of few tensors only is added to these, so that all others keep the digest that they always had.
    described = msgpack.packb([(t.name, t.shape, t.dtype, t.rule, t.fragment, *(t.matrix,) * t.matrix) for t in table])
    fragments = tuple(FragmentLayout(p, tuple(members[p])) for p in sorted(members))
    return Layout(fragments, digest_of(described))
