"""One global fragment and its momentum: judging deltas, merging them, taking the outer step. Pure: numpy only.

The step is written into a `Draft`, whose payloads can be uploaded while they grow. `merge` returns what the fragment
would become, and only `advance` changes the fragment, after the commit has succeeded. A refused commit therefore leaves
the state unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.head import MERGES_KEPT, MergedBase
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.tape import Contribution, RefusalReason
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, Vector, nobody
from diloco.pipeline.ramps import interval_in_force
from diloco.pipeline.transfer.globals import GrowingGlobal
from diloco.syncer.admission import Offer
from diloco.syncer.algorithm import clip_factors, merge_weights
from diloco.syncer.merging.cosine import cosines
from diloco.syncer.merging.merge import Float32, Float64, Reduced, Sum, all_finite, merge_shares, rebase
from diloco.syncer.merging.outer import (
    AveragingStep,
    Momentum,
    NesterovStep,
    PlainStep,
    matrix_blocks,
    matrix_elements,
    outer_at,
)

# A delta is refused if it is more than this many times as long as the running median of its fragment's deltas.
ABSURD_NORM_FACTOR = 100.0
# Deltas are also judged by the norm of the fragment's values, for which their root mean square counts as at least this.
LEAST_RMS = 0.01
# With fewer merges than this there is no median to judge by, however many learners took part. The first deltas of a run
# hold one step at a learning rate that still warms up. They are thousands of times shorter than all later ones, which
# would be refused for ever.
MERGES_NEEDED = 4


# --- a version in the making ---------------------------------------------------------------------------


class Draft:
    """Memory for the values and the momentum after an outer step, with digests of the part that is written.

    `sum` adds up the contributions in the memory where the values will be. Then `prepare` must be called, and the step
    is written from front to back.
    """

    def __init__(self, layout: FragmentLayout, sync: SyncSpec, grown: Grown = nobody) -> None:
        """Make an empty draft.

        Args:
            layout: of the fragment.
            sync: how the run synchronises.
            grown: called by the thread that takes the step, when more chunks of any payload are whole.
        """
        self._sync, self._grown = sync, grown
        self.theta: Float32 = pooled(layout.elements, np.float32)
        """(elements,): the sum at first, the new values in the end."""
        self.momentum: Float32 | None = None
        """(elements,) after the step; None stands for zeros."""
        self._growing: GrowingGlobal | None = None
        self.sum = Sum(layout, self.theta)

    @property
    def growing(self) -> GrowingGlobal:
        """The payloads, once they are prepared."""
        assert self._growing is not None  # noqa: S101  # it is prepared
        return self._growing

    def prepare(self, mu: float) -> None:
        """Set up the payloads for the coming step. Must be called before the uploads begin; calling it twice is safe.

        mu: outer momentum; with 0 the step keeps no momentum.
        """
        if self._growing is None:
            self.momentum = pooled(len(self.theta), np.float32) if mu else None
            self._growing = GrowingGlobal(self.theta, self.momentum, self._sync, self._grown)


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
    digest: bytes
    theta: Float32
    momentum: Float32 | None
    contributions: tuple[Contribution, ...]
    merged: tuple[MergedBase, ...]
    norms: tuple[float, ...]
    """See `Head.norms`."""
    norm: float
    directions: Float64
    """See `merge.Reduced`, also for `norm`."""
    orthogonal: Float32 | None = None
    """See `Stepped.orthogonal`."""
    finite: bool = True
    """True if values and momentum have no NaN and no infinity. Otherwise the state must not be committed."""


def finite(theta: Float32, momentum: Float32 | None) -> bool:
    """Return whether values (elements,) and momentum (elements,) have no NaN and no infinity."""
    return all_finite(theta) and (momentum is None or all_finite(momentum))


# --- the outer step ------------------------------------------------------------------------------------


class Stepped(NamedTuple):
    """Values and momentum after an outer step, and the measurements of its merge."""

    theta: Float32
    momentum: Float32 | None
    reduced: Reduced
    orthogonal: Float32 | None = None
    """(matrix elements,): `found` of `outer.matrix_blocks`; None for a step that orthogonalises nothing."""


def orthogonalises(layout: FragmentLayout, sync: SyncSpec, mu: float) -> bool:
    """Return whether an outer step with this momentum orthogonalises matrices. A step that only averages does not."""
    return sync.outer == "halley" and mu > 0 and matrix_elements(layout) > 0


def outer_step(
    layout: FragmentLayout,
    sync: SyncSpec,
    outer: tuple[float, float],
    theta: Float32,
    before: Float32 | None,
    deltas: Sequence[Vector],
    norms: Sequence[Float64],
    shares: Sequence[float],
    recorded: Float64 | None = None,
    draft: Draft | None = None,
    recorded_step: Float32 | None = None,
    factors: Sequence[float] | None = None,
) -> Stepped:
    """Merge and take the outer step in new memory (paper: RDA, outer optimizer); `theta` and `before` are not changed.

    Args:
        layout, deltas, norms, shares, recorded, factors: see `merge.Sum` and its `close`.
        sync: outer optimizer, codec of the global and chunk size.
        outer: learning rate and momentum, from `outer.outer_at`.
        theta: (elements,) values at the base.
        before: (elements,) momentum before the step; None stands for zeros.
        draft: memory for the outcome; the first of the deltas may be in its sum already. None: it is made here.
        recorded_step: `Stepped.orthogonal` of an earlier step, which replaces what is computed here (for a replay).
    """
    lr, mu = outer
    into = draft or Draft(layout, sync)
    into.prepare(mu)
    close = partial(into.sum.close, deltas, norms, shares, recorded, factors=factors)
    if not mu:  # no momentum is kept by a step that only averages: the next step with momentum starts from zeros
        averaged = layout.averaged
        plain = AveragingStep(layout, theta, into.theta) if averaged else PlainStep(theta, into.theta, lr)
        return Stepped(into.theta, None, _elementwise(plain, into.growing, close))
    assert into.momentum is not None  # noqa: S101  # it is prepared
    step = NesterovStep(theta, Momentum(before, into.momentum, mu), into.theta, lr)
    if not orthogonalises(layout, sync, mu):
        return Stepped(into.theta, into.momentum, _elementwise(step, into.growing, close))
    # A matrix is orthogonalised as a whole, so all of it must be merged first: this needs a second pass.
    reduced = close()
    found = np.empty(matrix_elements(layout), np.float32)
    for stop in matrix_blocks(layout, step, found, recorded_step):
        into.growing.grow_to(stop)
    return Stepped(into.theta, into.momentum, reduced, found)


def _elementwise(step: PlainStep, growing: GrowingGlobal, close: Callable[..., Reduced]) -> Reduced:
    """Take a step that handles each block once, right after its merge, while it is in the CPU cache."""

    def stepped(start: int, stop: int) -> None:
        step.block(start, stop)
        growing.grow_to(stop)

    return close(each_block=stepped)


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

    def judge(self, offer: Offer, values: Vector, norms: Float64) -> Delta | tuple[RefusalReason, str]:
        """Return a downloaded delta if it is sound, otherwise the reason for which it is refused.

        Args:
            offer: its header.
            values: (elements,) in any codec.
            norms: `delta_norms` (tensors,), measured by this syncer: a learner's own report is not trusted.
        """
        delta = Delta(offer, values, norms)
        if not np.isfinite(delta.norm):
            return RefusalReason.NON_FINITE, "the delta has elements that are not finite"
        usual = median(self.norms) if len(self.norms) >= MERGES_NEEDED else None
        if usual is not None and delta.norm <= ABSURD_NORM_FACTOR * usual:
            return delta
        # While the learning rate warms up, the deltas of the first merges are thousands of times shorter than all later
        # ones, and so is the median. So a delta that is no longer than the values themselves is never absurd. Where no
        # median is known, it may be `ABSURD_NORM_FACTOR` times as long as they are.
        own = max(float(np.linalg.norm(self.theta)), LEAST_RMS * np.sqrt(self.layout.elements))
        if delta.norm <= (own if usual is not None else ABSURD_NORM_FACTOR * own):
            return delta
        known = "" if usual is None else f", the running median {usual:.3g}"
        return RefusalReason.ABSURD_NORM, f"norm {delta.norm:.3g}; the fragment's own is {own:.3g}{known}"

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

    def outer(self, deltas: Sequence[Delta]) -> tuple[float, float]:
        """Return the outer learning rate and momentum of the step that merges these."""
        return outer_at(self.sync, self.version, (delta.offer.header.steps for delta in deltas), self.interval)

    def shares(self, deltas: Sequence[Delta]) -> tuple[float, ...]:
        """Return `merge_shares` of a window's deltas."""
        counters = [(d.offer.header.steps, d.offer.header.tokens) for d in deltas]
        return merge_shares(counters, self.sync.weights, interval=self._interval_in_force())

    def _interval_in_force(self) -> int:
        return interval_in_force(self.sync, self.version, self.interval)

    def factors(self, deltas: Sequence[Delta]) -> tuple[float, ...]:
        """Return `algorithm.clip_factors` of a window's deltas, which `rebased` returned."""
        return clip_factors([delta.norm for delta in deltas], self.sync.delta_clip)

    def merge(self, deltas: Sequence[Delta], before: Sequence[MergedBase], draft: Draft | None = None) -> Merged:
        """Merge by token weights and take the outer step (paper: merge weight, RDA, outer optimizer).

        Args:
            deltas: M_t, which `rebased` returned, in the order in which they are summed.
            before: the head's record of merged bases.
            draft: memory for the outcome; the first of the deltas may be in its sum already.

        Returns:
            The state after the step. This object is not changed; see `advance`.
        """
        draft = draft or Draft(self.layout, self.sync)
        headers, interval = [d.offer.header for d in deltas], self._interval_in_force()
        weights = merge_weights([(h.steps, h.tokens) for h in headers], self.sync.weights, interval=interval)
        stepped = self.step(deltas, self.shares(deltas), draft)
        version, factors = self.version + 1, self.factors(deltas)
        # Deltas on older bases than the last one are refused as too stale anyway, so their record can be dropped.
        merged = {(m.learner, m.incarnation): m for m in before if m.base_version >= version - 1}
        for h in headers:
            merged[h.learner, h.incarnation] = MergedBase(
                learner=h.learner, incarnation=h.incarnation, base_version=h.base_version, tokens=h.tokens
            )
        return Merged(
            version=version,
            digest=draft.growing.digest,
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
            norm=stepped.reduced.norm,
            directions=stepped.reduced.directions,
            orthogonal=stepped.orthogonal,
            finite=finite(stepped.theta, stepped.momentum),
        )

    def step(self, deltas: Sequence[Delta], shares: Sequence[float], draft: Draft) -> Stepped:
        """Merge and take the outer step into `draft`. Experiments may override this method."""
        values, norms, factors = [d.values for d in deltas], [d.norms for d in deltas], self.factors(deltas)
        at = self.layout, self.sync, self.outer(deltas), self.theta, self.momentum
        return outer_step(*at, values, norms, shares, draft=draft, factors=factors)

    def advance(self, merged: Merged) -> None:
        """Take over the outcome of a merge whose commit has succeeded."""
        self.version, self.digest, self.before = merged.version, merged.digest, self.theta
        self.theta, self.momentum = merged.theta, merged.momentum
        self.norms = merged.norms
