"""One global fragment and its outer state: judging deltas, merging them, taking the outer step. Pure: numpy only.

Nothing here changes before a commit has succeeded: `merge` returns what the fragment would become, `advance`
makes it so. A refused commit therefore leaves the state as it was.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.codec import Vector, as_bytes, payload_digest
from pipeline.fragments import FragmentLayout
from pipeline.messages import Contribution, MergedBase, RefusalReason, SyncSpec
from pipeline.ramps import outer_at

from .merge import Float64, Reduced, delta_norms, merge, merge_weights
from .outer import nesterov_step
from .window import Offer

Array = npt.NDArray[Any]

ABSURD_NORM_FACTOR = 100.0
"""A delta this many times longer than the running median of its fragment is refused."""
LEAST_RMS = 0.01
"""Values smaller than this on the average are taken for this large when no median is known."""
NORMS_KEPT = 64
NORMS_NEEDED = 8
"""Fewer accepted norms than this give no median to judge by."""


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


class Stepped(NamedTuple):
    """Values and momentum after an outer step, and what its merge measured."""

    theta: npt.NDArray[np.float32]
    momentum: npt.NDArray[np.float32] | None
    reduced: Reduced


def outer_step(
    layout: FragmentLayout,
    sync: SyncSpec,
    version: int,
    theta: npt.NDArray[np.float32],
    momentum: npt.NDArray[np.float32] | None,
    deltas: Sequence[Vector],
    norms: Sequence[Float64],
    weights: Float64,
    recorded: Float64 | None = None,
) -> Stepped:
    """Merge and take the outer step, on copies: `theta` and `momentum` stay as they are (paper: RDA, outer optimizer).

    Args:
        layout, deltas, norms, weights, recorded: as `merge.merge`.
        sync: has the outer learning rate and momentum.
        version: of the base, on which they may depend.
        theta: (elements,) values at the base.
        momentum: (elements,), or None while all zero.
    """
    pseudogradient = np.empty_like(theta)
    reduced = merge(layout, deltas, norms, weights, pseudogradient, recorded)
    theta = theta.copy()
    lr, mu = outer_at(sync, version)
    if mu == 0:  # none is gathered while it has no say: the first step with momentum is as the first of a run
        momentum = None
    elif momentum is None:
        momentum = np.zeros_like(theta)
    else:
        momentum = momentum.copy()
    nesterov_step(theta, momentum, pseudogradient, lr, mu)
    return Stepped(theta, momentum, reduced)


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
        self._norms: deque[float] = deque(maxlen=NORMS_KEPT)

    def judge(self, offer: Offer, values: Vector) -> Delta | tuple[RefusalReason, str]:
        """A downloaded delta, or why it is refused. Computes the norms itself: a peer's word is not taken."""
        delta = Delta(offer, values, delta_norms(self.layout, values))
        if not np.isfinite(delta.norm):
            return RefusalReason.NON_FINITE, "the delta has elements that are not finite"
        if len(self._norms) >= NORMS_NEEDED:
            usual, of = median(self._norms), "the running median"
        else:  # too little is known: nothing may move the values by many times their own size
            floor = LEAST_RMS * np.sqrt(self.layout.elements)
            usual, of = max(float(np.linalg.norm(self.theta)), floor), "the fragment's own norm"
        if delta.norm > ABSURD_NORM_FACTOR * usual > 0:
            return RefusalReason.ABSURD_NORM, f"norm {delta.norm:.3g}, {of} is {usual:.3g}"
        return delta

    def merge(self, deltas: Sequence[Delta], before: Sequence[MergedBase]) -> Merged:
        """Token-weighted merge and the outer step (paper: merge weight, RDA, outer optimizer).

        Args:
            deltas: M_t, in the order in which they are summed.
            before: the head's record of merged bases.
        """
        headers = [d.offer.header for d in deltas]
        weights = merge_weights([(h.steps, h.tokens) for h in headers])
        values, norms = [d.values for d in deltas], [d.norms for d in deltas]
        stepped = outer_step(self.layout, self.sync, self.version, self.theta, self.momentum, values, norms, weights)
        version = self.version + 1
        # Older bases than the last one are refused as stale anyway: their record can go.
        merged = {(m.learner, m.incarnation): m for m in before if m.base_version >= version - 1}
        for h in headers:
            merged[h.learner, h.incarnation] = MergedBase(
                learner=h.learner, incarnation=h.incarnation, base_version=h.base_version, tokens=h.tokens
            )
        return Merged(
            version=version,
            digest=payload_digest(as_bytes(stepped.theta), self.sync.chunk_bytes),
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
        )

    def advance(self, merged: Merged) -> None:
        """The commit succeeded."""
        self.version, self.digest = merged.version, merged.digest
        self.theta, self.momentum = merged.theta, merged.momentum
        self._norms.extend(c.norm for c in merged.contributions)
