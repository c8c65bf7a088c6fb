"""An inner optimizer's state in the form that is saved and offered to peers: flat vectors and numbers. No torch.

Moments are statistics of gradients. They need not belong to exactly the parameters that they are loaded with: a
learner always begins from the run's heads, and takes moments from its own earlier checkpoint or from a live peer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import BadPayload
from diloco.pipeline.fragments import Layout, Slot
from diloco.pipeline.messages.moments import OptimizerKind
from diloco.workers.encoding import Float32

# Moments that are means or sums of squares (torch's names).
NEVER_NEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"})


@dataclass(frozen=True, slots=True)
class Moments:
    """The state that one inner optimizer has gathered, at one step or at neighbouring ones."""

    kind: OptimizerKind
    flats: tuple[Mapping[str, Float32], ...]
    """By fragment: name of the moment -> flat float32 vector (elements,) of the tensors that have it."""
    numbers: Mapping[str, tuple[float, ...]]
    """Name -> one value a tensor, fragment by fragment in the layout's order; 0 for a tensor without it."""
    others: Mapping[tuple[str, str], npt.NDArray[Any]] = field(default_factory=dict)
    """(name of the state, name of the tensor) -> any other array: kept in checkpoints, of no use to a peer."""


@dataclass(frozen=True, slots=True)
class KeptLayout(Layout):
    """A layout whose tensors do not all have the same moments."""

    kept: Mapping[str, Layout]
    """Moment -> the same fragments, with only the tensors that have it; a fragment may have none."""


def of_moment(layout: Layout, name: str) -> Layout:
    """Return the layout of one moment's flat vectors."""
    return layout.kept[name] if isinstance(layout, KeptLayout) else layout


def slots(layout: Layout) -> Iterator[tuple[int, Slot]]:
    """Yield all tensors of a layout in its order, with their fragments' ids."""
    for fragment in layout.fragments:
        for slot in fragment.slots:
            yield fragment.id, slot


def offered_bytes(layout: Layout, kind: OptimizerKind) -> int:
    """Return the size in bytes of moments of this kind when a peer offers them, in float32."""
    return 4 * sum(of_moment(layout, name).elements for name in kind.moments)


def check(moments: Moments, layout: Layout) -> None:
    """Refuse moments that an optimizer could not continue from.

    Raises:
        BadPayload: names or sizes are not the expected ones, a value is not finite, or a second moment is negative.
    """
    tensors = sum(1 for _ in slots(layout))
    if tuple(sorted(moments.numbers)) != moments.kind.numbers:
        raise BadPayload(f"has numbers {sorted(moments.numbers)}, but announced {list(moments.kind.numbers)}")
    for name, values in moments.numbers.items():
        if len(values) != tensors:
            raise BadPayload(f"{name} has {len(values)} values for {tensors} tensors")
        if not np.isfinite(values).all() or (name == "step" and min(values) < 0):
            raise BadPayload(f"{name} has a value that is negative or not finite")
    if len(moments.flats) != len(layout.fragments):
        raise BadPayload(f"moments of {len(moments.flats)} fragments for {len(layout.fragments)}")
    for fragment, flats in zip(layout.fragments, moments.flats, strict=True):
        if tuple(sorted(flats)) != moments.kind.moments:
            raise BadPayload(f"has moments {sorted(flats)}, but announced {list(moments.kind.moments)}")
        for name, flat in flats.items():
            elements = of_moment(layout, name).fragments[fragment.id].elements
            if flat.shape != (elements,):
                raise BadPayload(f"{name} of fragment {fragment.id} is {flat.shape}, not ({elements},)")
            if not np.isfinite(flat).all():
                raise BadPayload(f"{name} of fragment {fragment.id} is not finite")
            if name in NEVER_NEGATIVE and flat.min(initial=0.0) < 0:
                raise BadPayload(f"{name} of fragment {fragment.id} has negative elements")
