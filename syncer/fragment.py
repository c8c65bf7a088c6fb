"""One global fragment and its outer state: judging deltas, merging them, taking the outer step. Pure: numpy only.

Nothing here changes before a commit has succeeded: `merge` returns what the fragment would become, `advance`
makes it so. A refused commit therefore leaves the state as it was.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.codec import Vector
from pipeline.fragments import FragmentLayout
from pipeline.messages import Contribution, MergedBase, RefusalReason, SyncSpec
from pipeline.ramps import outer_at

from .algorithm import merge_weights
from .merge import Reduced, Sum, merge_shares
from .norms import Float64, all_finite
from .outer import NesterovStep, matrix_elements, muon_step
from .room import Room
from .window import Offer

Array = npt.NDArray[Any]

ABSURD_NORM_FACTOR = 100.0
"""A delta this many times longer than the running median of its fragment is refused."""
LEAST_RMS = 0.01
"""Values smaller than this on the average are taken for this large when no median is known."""
MERGES_KEPT = 32
MERGES_NEEDED = 4
"""Fewer merges than this give no median to judge by, however many learners they are of: a run's first deltas are of one
step at a rate that still warms up, thousands of times shorter than all others, which would be refused for ever."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A sound, complete delta: flat vector (elements,) as it came and its per-tensor norms."""

    offer: Offer
    values: Vector
    norms: npt.NDArray[np.float64]

    @property
    def norm(self) -> float:
        """L2 norm of the whole delta."""
        return float(np.linalg.norm(self.norms))


@dataclass(frozen=True, slots=True)
class Merged:
    """What the fragment becomes if the commit succeeds."""

    version: int
    digest: bytes
    theta: npt.NDArray[np.float32]
    momentum: npt.NDArray[np.float32] | None
    contributions: tuple[Contribution, ...]
    merged: tuple[MergedBase, ...]
    norm: float
    directions: Float64
    """As `merge.Reduced`."""
    orthogonal: npt.NDArray[np.float32] | None = None
    """As `Stepped`."""
    finite: bool = True
    """Values and momentum have no NaN and no infinity: it may be committed."""


def finite(theta: npt.NDArray[np.float32], momentum: npt.NDArray[np.float32] | None) -> bool:
    """Whether values and momentum, (elements,) each, have no NaN and no infinity."""
    return all_finite(theta) and (momentum is None or all_finite(momentum))


class Stepped(NamedTuple):
    """Values and momentum after an outer step, and what its merge measured."""

    theta: npt.NDArray[np.float32]
    momentum: npt.NDArray[np.float32] | None
    reduced: Reduced
    orthogonal: npt.NDArray[np.float32] | None = None
    """(matrix elements,) as `outer.muon_step` returned it; None for a step that orthogonalises nothing."""


def orthogonalises(layout: FragmentLayout, sync: SyncSpec, mu: float) -> bool:
    """Whether an outer step with this momentum is Muon's: while learners are only averaged it is not."""
    return sync.outer == "muon" and mu > 0 and matrix_elements(layout) > 0


def outer_step(
    layout: FragmentLayout,
    sync: SyncSpec,
    outer: tuple[float, float],
    theta: npt.NDArray[np.float32],
    momentum: npt.NDArray[np.float32] | None,
    deltas: Sequence[Vector],
    norms: Sequence[Float64],
    shares: Sequence[float],
    recorded: Float64 | None = None,
    room: Room | None = None,
    recorded_step: npt.NDArray[np.float32] | None = None,
) -> Stepped:
    """Merge and take the outer step, in new memory: `theta` and `momentum` stay (paper: RDA, outer optimizer).

    Args:
        layout, deltas, norms, shares, recorded: as `merge.merge`.
        sync: has the chunk size.
        outer: learning rate and momentum, as `ramps.outer_at`.
        theta: (elements,) values at the base.
        momentum: (elements,), or None while all zero.
        room: where to, if that is here already; the first of the deltas may be in its sum.
        recorded_step: what a Muon step goes by instead of what is computed here; as `Stepped.orthogonal`.
    """
    lr, mu = outer
    into = room or Room(layout.elements, sync)
    into.gather(mu, orthogonalises(layout, sync, mu))
    into.begin(theta, momentum, lr, mu)
    before = theta if into.update is None else None  # what is subtracted from it is quantized first
    sum_ = into.sum or Sum(layout, into.theta)
    if orthogonalises(layout, sync, mu):
        assert into.momentum is not None  # noqa: S101  # gathered: mu is not 0
        # A matrix is orthogonalised as a whole, so once all of it is merged: a second pass.
        reduced = sum_.close(deltas, norms, shares, recorded)
        into.reduced()
        orthogonal = muon_step(
            layout,
            before,
            momentum,
            into.theta,
            into.momentum,
            lr,
            mu,
            lambda _, stop: into.written(stop),
            recorded_step,
        )
        return Stepped(into.theta, into.momentum, reduced, orthogonal)
    # None is gathered while it has no say: the first step with momentum is as the first of a run.
    step = NesterovStep(before, momentum if mu else None, into.theta, into.momentum, lr, mu)

    def finish(start: int, stop: int) -> None:
        step.block(start, stop)
        into.written(stop)

    reduced = sum_.close(deltas, norms, shares, recorded, finish)
    return Stepped(into.theta, into.momentum, reduced)


class FragmentState:
    """Global values, outer momentum and the norms seen, at one version.

    theta: flat float32 vector (elements,). momentum: the same, or None while all zero.
    """

    def __init__(
        self,
        layout: FragmentLayout,
        sync: SyncSpec,
        version: int,
        digest: bytes,
        theta: npt.NDArray[np.float32],
        momentum: npt.NDArray[np.float32] | None,
    ) -> None:
        self.layout = layout
        self.sync = sync
        self.version = version
        self.digest = digest
        self.theta = theta
        self.momentum = momentum
        self._norms: deque[float] = deque(maxlen=MERGES_KEPT)
        """Median norm of each merge's contributions."""

    def judge(self, offer: Offer, values: Vector, norms: Float64) -> Delta | tuple[RefusalReason, str]:
        """A downloaded delta with its `delta_norms`, taken here: a peer's word is not. Or why it is refused."""
        delta = Delta(offer, values, norms)
        if not np.isfinite(delta.norm):
            return RefusalReason.NON_FINITE, "the delta has elements that are not finite"
        usual = median(self._norms) if len(self._norms) >= MERGES_NEEDED else None
        if usual is not None and delta.norm <= ABSURD_NORM_FACTOR * usual:
            return delta
        # A rate that warms up makes the first merges' deltas thousands of times shorter than all later ones: what moves
        # the values by no more than their own size is never absurd. Where too little is known, by many times their own.
        own = max(float(np.linalg.norm(self.theta)), LEAST_RMS * np.sqrt(self.layout.elements))
        if delta.norm <= (own if usual is not None else ABSURD_NORM_FACTOR * own):
            return delta
        known = "" if usual is None else f", the running median {usual:.3g}"
        return RefusalReason.ABSURD_NORM, f"norm {delta.norm:.3g}; the fragment's own is {own:.3g}{known}"

    def outer(self, deltas: Sequence[Delta]) -> tuple[float, float]:
        """Outer learning rate and momentum of the step that merges these."""
        return outer_at(self.sync, self.version, (delta.offer.header.steps for delta in deltas))

    def merge(self, deltas: Sequence[Delta], before: Sequence[MergedBase], room: Room | None = None) -> Merged:
        """Token-weighted merge and the outer step (paper: merge weight, RDA, outer optimizer).

        Args:
            deltas: M_t, in the order in which they are summed.
            before: the head's record of merged bases.
            room: memory for the outcome; the first of the deltas may be in its sum.
        """
        room = room or Room(self.layout.elements, self.sync)
        headers = [d.offer.header for d in deltas]
        counters = [(h.steps, h.tokens) for h in headers]
        weights, shares = merge_weights(counters, self.sync.weights), merge_shares(counters, self.sync.weights)
        stepped = self.step(deltas, shares, room)
        version = self.version + 1
        # Older bases than the last one are refused as stale anyway: their record can go.
        merged = {(m.learner, m.incarnation): m for m in before if m.base_version >= version - 1}
        for h in headers:
            merged[h.learner, h.incarnation] = MergedBase(
                learner=h.learner, incarnation=h.incarnation, base_version=h.base_version, tokens=h.tokens
            )
        return Merged(
            version=version,
            digest=room.payload.digest,
            theta=stepped.theta,
            momentum=stepped.momentum,
            contributions=tuple(
                Contribution(
                    learner=h.learner,
                    incarnation=h.incarnation,
                    base_version=h.base_version,
                    attempt=h.attempt,
                    steps=h.steps,
                    tokens=h.tokens,
                    weight=float(w),
                    norm=d.norm,
                )
                for h, w, d in zip(headers, weights, deltas, strict=True)
            ),
            merged=tuple(merged.values()),
            norm=stepped.reduced.norm,
            directions=stepped.reduced.directions,
            orthogonal=stepped.orthogonal,
            finite=finite(stepped.theta, stepped.momentum),
        )

    def step(self, deltas: Sequence[Delta], shares: Sequence[float], room: Room) -> Stepped:
        """Merge and take the outer step into `room`; research puts another one in its place."""
        values, norms = [d.values for d in deltas], [d.norms for d in deltas]
        return outer_step(
            self.layout, self.sync, self.outer(deltas), self.theta, self.momentum, values, norms, shares, room=room
        )

    def advance(self, merged: Merged) -> None:
        """The commit succeeded."""
        self.version, self.digest = merged.version, merged.digest
        self.theta, self.momentum = merged.theta, merged.momentum
        self._norms.append(median(c.norm for c in merged.contributions))


MakeFragment = Callable[
    [FragmentLayout, SyncSpec, int, bytes, npt.NDArray[np.float32], npt.NDArray[np.float32] | None], FragmentState
]
"""`FragmentState`, or something in its place: layout, sync, version, digest, theta, momentum."""
