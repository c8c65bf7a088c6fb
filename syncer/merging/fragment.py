"""One global fragment and its momentum: judging deltas, merging them, taking the outer step. Pure: numpy only.

`merge` returns what the fragment would become, and only `advance` changes the fragment, after the commit has succeeded.
A refused commit therefore leaves the state unchanged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.fragment import MERGES_KEPT, Contribution, MergedBase, RefusalReason
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.codec import Grown, Vector, do_nothing
from diloco.pipeline.ramps import interval_in_force
from diloco.syncer.admission import Offer
from diloco.syncer.algorithm import clip_factors, merge_weights
from diloco.syncer.merging.merge import Contributions, Float32, Float64, Sum, all_finite, merge_shares, rebase
from diloco.syncer.merging.outer import Outer, OuterStep, State, Stepped, outer_at

# A delta is refused if it is more than this many times as long as the running median of its fragment's deltas.
ABSURD_NORM_FACTOR = 100.0
# Deltas are also judged by the norm of the fragment's values, for which their root mean square counts as at least this.
MIN_RMS = 0.01
# With fewer merges than this there is no median to judge by, however many learners took part. The first deltas of a run
# hold one step at a learning rate that still warms up. They are thousands of times shorter than all later ones, which
# would be refused forever.
MERGES_NEEDED = 4

# At most this many elements of a vector are sampled: the sampling error of a cosine is about 1 / sqrt(SAMPLE) = 0.004.
SAMPLE = 64 * 1024
# Sampled elements of all deltas together (64 MiB): with more than 128 deltas, each has a smaller sample.
SAMPLES = 8 * 1024 * 1024
# A sample consists of stretches of this many adjacent elements.
STRETCH = 256
# Directions whose sum is shorter than this cancel: what is left is rounding.
CANCELLED = 1e-9


# --- what goes in and what comes out --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delta:
    """A sound, complete delta: the flat vector (elements,) as it is merged, and its norms (tensors,)."""

    offer: Offer
    values: Vector
    norms: npt.NDArray[np.float64]
    stale: "Delta | None" = None
    """The delta as it was sent, if this one is rebased from it."""

    @property
    def norm(self) -> float:
        """L2 norm of the whole delta."""
        return float(np.linalg.norm(self.norms))

    @property
    def sent(self) -> "Delta":
        """The delta as it was sent."""
        return self.stale or self


@dataclass(frozen=True, slots=True)
class Merged:
    """State of the fragment after the commit, if it succeeds."""

    version: int
    stepped: Stepped
    contributions: tuple[Contribution, ...]
    merged: tuple[MergedBase, ...]
    norms: tuple[float, ...]
    """See `Head.norms`."""
    rho: float | None
    """`Committed.rho`; None if the pseudogradient before is not known, or this merge is not finite."""
    finite: bool
    """True if values and momentum have no NaN and no infinity. Otherwise the state must not be committed."""


def finite(theta: Float32, momentum: Float32 | None) -> bool:
    """Return whether values (elements,) and momentum (elements,) have no NaN and no infinity."""
    return all_finite(theta) and (momentum is None or all_finite(momentum))


# --- the fragment --------------------------------------------------------------------------------------


class FragmentState:
    """Global values, momentum and norms of earlier deltas, at one version.

    theta and momentum are flat float32 vectors (elements,); a momentum of None stands for zeros. `before` is the theta
    of the version before, which rebasing stale deltas needs. It is None if this object did not make that step itself,
    that is, if the version was loaded from the bus.
    """

    def __init__(
        self,
        layout: FragmentLayout,
        sync: SyncSpec,
        version: int,
        digest: bytes,
        theta: Float32,
        momentum: Float32 | None,
    ) -> None:
        self.layout = layout
        self.sync = layout.sync(sync)
        self.version = version
        self.digest = digest
        self.theta = theta
        self.momentum = momentum
        self.interval = 0
        """`Head.interval` of this version."""
        self.norms: tuple[float, ...] = ()
        """`Head.norms` of this version."""
        self.before: Float32 | None = None
        self.sample: Float32 | None = None
        """`Stepped.sample` of the last merge; None if this object did not make it."""

    def judge(self, offer: Offer, values: Vector, norms: Float64) -> Delta | tuple[RefusalReason, str]:
        """Return a downloaded delta if it is sound, otherwise the reason for which it is refused.

        Args:
            values: (elements,) in any codec.
            norms: `delta_norms` (tensors,), measured by this syncer: a learner's own report is not trusted.
        """
        delta = Delta(offer, values, norms)
        if not np.isfinite(delta.norm):
            return RefusalReason.NON_FINITE, "the delta has non-finite elements"
        usual = median(self.norms) if len(self.norms) >= MERGES_NEEDED else None
        if usual is not None and delta.norm <= ABSURD_NORM_FACTOR * usual:
            return delta
        # While the learning rate warms up, the deltas of the first merges are thousands of times shorter than all later
        # ones, and so is the median. So a delta that is no longer than the values themselves is never absurd. Where no
        # median is known, it may be `ABSURD_NORM_FACTOR` times as long as they are.
        own = max(float(np.linalg.norm(self.theta)), MIN_RMS * np.sqrt(self.layout.elements))
        if delta.norm <= (own if usual is not None else ABSURD_NORM_FACTOR * own):
            return delta
        known = "" if usual is None else f", and the running median is {usual:.3g}"
        return RefusalReason.ABSURD_NORM, f"norm {delta.norm:.3g}; the fragment's own norm is {own:.3g}{known}"

    def is_stale(self, delta: Delta) -> bool:
        """Return whether a delta was measured from an older version than this."""
        return delta.offer.header.base_version < self.version

    def rebases(self, delta: Delta) -> bool:
        """Return whether a delta must still be rebased before it is summed: stale, with the version before known."""
        return self.before is not None and delta.stale is None and self.is_stale(delta)

    def rebased(self, delta: Delta) -> Delta:
        """Return a delta as it is merged into this version: measured from its values if it `rebases`, or unchanged."""
        if self.before is None or not self.rebases(delta):
            return delta
        return Delta(delta.offer, *rebase(self.layout, delta.values, self.theta, self.before), stale=delta)

    def outer(self, deltas: Sequence[Delta]) -> Outer:
        """Return the outer learning rate and momentum of the step that merges these."""
        return outer_at(self.sync, self.version, (delta.offer.header.steps for delta in deltas), self.interval)

    def contributions(self, deltas: Sequence[Delta]) -> Contributions:
        """Return a window's deltas, which `rebased` returned, as they are merged (paper: merge weight)."""
        shares = merge_shares(_counters(deltas), self.sync.weights, interval=self._interval_in_force())
        factors = clip_factors([delta.norm for delta in deltas], self.sync.delta_clip)
        return Contributions([delta.values for delta in deltas], [delta.norms for delta in deltas], shares, factors)

    def _interval_in_force(self) -> int:
        return interval_in_force(self.sync, self.version, self.interval)

    def outer_step(self, deltas: Sequence[Delta], total: Sum, grown: Grown = do_nothing) -> OuterStep:
        """Return the step that merges a window's deltas. Experiments may override this method.

        Args:
            deltas: M_t, which `rebased` returned, in the order in which they are summed.
            total: has the first of them, or none; overwritten by the step.
        """
        at = self.contributions(deltas), self.sync, self.outer(deltas), State(self.theta, self.momentum)
        starts, stretch = _stretches(self.layout.elements, SAMPLE)
        return OuterStep(total, *at, grown, (starts[:, None] + np.arange(stretch)).reshape(-1))

    def merge(self, deltas: Sequence[Delta], before: Sequence[MergedBase], step: OuterStep | None = None) -> Merged:
        """Merge by token weights and take the outer step (paper: merge weight, RDA, outer optimizer).

        Args:
            deltas: M_t, which `rebased` returned, in the order in which they are summed.
            before: the head's record of merged bases.
            step: `outer_step` of these deltas, not taken yet; None: one with an empty sum.

        Returns:
            The state after the step. This object is not changed; see `advance`.
        """
        headers, factors = [d.offer.header for d in deltas], self.contributions(deltas).factors
        weights = merge_weights(_counters(deltas), self.sync.weights, interval=self._interval_in_force())
        stepped = (step or self.outer_step(deltas, Sum(self.layout))).take()
        version, is_finite = self.version + 1, finite(stepped.theta, stepped.momentum)
        # Deltas on older bases than the last one are refused as too stale anyway, so their record can be dropped.
        merged = {(m.learner, m.incarnation): m for m in before if m.base_version >= version - 1}
        for h in headers:
            merged[h.learner, h.incarnation] = MergedBase(
                learner=h.learner, incarnation=h.incarnation, base_version=h.base_version, tokens=h.tokens
            )
        return Merged(
            version=version,
            stepped=stepped,
            contributions=tuple(
                Contribution(
                    learner=h.learner,
                    incarnation=h.incarnation,
                    base_version=h.base_version,
                    attempt=h.attempt,
                    steps=h.steps,
                    tokens=h.tokens,
                    weight=float(w),
                    norm=d.sent.norm,
                    rebased=d.stale is not None,
                    factor=factor,
                    cosine=cosine,
                )
                for h, w, d, factor, cosine in zip(
                    headers, weights, deltas, factors, cosines([d.sent.values for d in deltas]), strict=True
                )
            ),
            merged=tuple(merged.values()),
            norms=(*self.norms, median(d.sent.norm for d in deltas))[-MERGES_KEPT:],
            rho=_cosine(stepped.sample, self.sample) if is_finite and self.sample is not None else None,
            finite=is_finite,
        )

    def advance(self, merged: Merged) -> None:
        """Take over the outcome of a merge whose commit has succeeded."""
        stepped = merged.stepped
        self.version, self.digest, self.before = merged.version, stepped.digest, self.theta
        self.theta, self.momentum = stepped.theta, stepped.momentum
        self.norms, self.sample = merged.norms, stepped.sample


def _counters(deltas: Sequence[Delta]) -> list[tuple[int, int]]:
    """Return steps and tokens of each delta."""
    return [(delta.offer.header.steps, delta.offer.header.tokens) for delta in deltas]


# --- for display ------------------------------------------------------------------------------------------


def cosines(deltas: Sequence[Vector]) -> list[float | None]:
    """Return the cosine of each delta with the mean direction of the others, -1 to 1; None for a single delta.

    It is 0 if either is zero. Each of the others counts by its direction only, so that a long one does not dominate
    their mean. A large fragment is sampled in stretches that are evenly spaced over it.

    Args:
        deltas: each (elements,), finite, in any codec.
    """
    if len(deltas) == 1:
        return [None]
    starts, stretch = _stretches(len(deltas[0]), min(SAMPLE, SAMPLES // len(deltas)))
    sampled = np.stack([np.concatenate([delta[at : at + stretch] for at in starts.tolist()]) for delta in deltas])
    directions = sampled.astype(np.float64)  # (deltas, sample)
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    directions /= np.where(lengths > 0, lengths, 1.0)
    total = directions.sum(axis=0)
    found: list[float | None] = []
    for direction in directions:
        others = total - direction
        length = float(np.linalg.norm(others))
        found.append(float(np.clip(direction @ others / length, -1.0, 1.0)) if length > CANCELLED else 0.0)
    return found


def _cosine(a: Float32, b: Float32) -> float:
    """Return the cosine of two finite vectors (elements,); 0 if either is zero."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    lengths = math.sqrt(np.dot(x, x)) * math.sqrt(np.dot(y, y))
    return float(np.clip(np.dot(x, y) / lengths, -1.0, 1.0)) if lengths else 0.0


def _stretches(elements: int, sample: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return the starts of evenly spaced stretches of a vector, `sample` elements or all of them, and their length."""
    if elements <= sample:
        return np.zeros(1, np.int64), elements
    return np.linspace(0, elements - STRETCH, sample // STRETCH).astype(np.int64), STRETCH
