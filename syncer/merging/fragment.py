"""One global fragment and its momentum: judging deltas, merging them, taking the outer step. Pure: numpy only.

The step is written into a draft, whose payloads grow meanwhile.
Nothing here changes before a commit has succeeded: `merge` returns what the fragment would become, `advance`
makes it so. A refused commit therefore leaves the state as it was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.pipeline.bus.commits import Published, Staged
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.head import MERGES_KEPT, Head, MergedBase
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.tape import Contribution, RefusalReason
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, Payload, Vector, as_bytes, nobody
from diloco.pipeline.ramps import interval_in_force
from diloco.pipeline.transfer.global_format import Kind, Momentum, Step, StepWriter
from diloco.pipeline.transfer.global_formats import FORMATS
from diloco.syncer.admission import Offer
from diloco.syncer.algorithm import clip_factors, merge_weights
from diloco.syncer.merging.cosine import cosines
from diloco.syncer.merging.merge import Float32, Float64, Reduced, Sum, all_finite, merge_shares, rebase
from diloco.syncer.merging.outer import (
    AveragingStep,
    NesterovStep,
    PlainStep,
    matrix_blocks,
    matrix_elements,
    outer_at,
)

ABSURD_NORM_FACTOR = 100.0
"""A delta this many times longer than the running median of its fragment is refused."""
LEAST_RMS = 0.01
"""Values smaller than this on the average are taken for this large when no median is known."""
MERGES_NEEDED = 4
"""Fewer merges than this give no median to judge by, however many learners they are of: a run's first deltas are of one
step at a rate that still warms up, thousands of times shorter than all others, which would be refused for ever."""


# --- a version in the making ---------------------------------------------------------------------------


class Draft:
    """The values and the momentum after an outer step, and the digests of what is there already.

    `sum` adds up the contributions where the values will be. Then, in this order: `prepare`, `uploads`,
    `step_writer`, and the step is written from front to back.
    """

    def __init__(self, layout: FragmentLayout, sync: SyncSpec, grown: Grown = nobody) -> None:
        """grown: called when more chunks of any payload are whole, by the thread that takes the step."""
        self._layout, self._sync, self._grown = layout, sync, grown
        self._writer = FORMATS[sync.global_codec].writer(layout.id, layout.elements, sync, grown)
        self.theta = self._writer.values
        """(elements,) in the end the new values."""
        self.momentum: Float32 | None = None
        """(elements,) after the step; None: zeros."""
        self._momentum_payload: Payload | None = None
        self.sum = Sum(layout, self.theta)

    @property
    def digest(self) -> bytes:
        """Of the exact values, once all are written."""
        return self._writer.exact.digest

    def prepare(self, mu: float, orthogonal: bool = False) -> None:
        """Before the uploads begin: what the step will be. Again for the same step it changes nothing.

        Args:
            mu: outer momentum; 0: the step keeps none.
            orthogonal: some of it is orthogonalised, so it does not tell its pseudogradient.
        """
        self._writer.prepare(averaged=not mu, told=not orthogonal)
        if mu and self.momentum is None:
            self.momentum = pooled(self._layout.elements, np.float32)
            self._momentum_payload = Payload(as_bytes(self.momentum), self._sync.chunk_bytes, self._grown)

    def step_writer(self, theta: Float32, before: Float32 | None, lr: float, mu: float) -> "DraftWriter":
        """What writes the step from these values (elements,) and this momentum (elements,); None: zeros."""
        momentum = None if self.momentum is None else Momentum(before, self.momentum, mu)
        step = self._writer.step_writer(Step(theta, lr, momentum))
        return DraftWriter(step, None if self._writer.takes_steps else theta, self._momentum_payload)

    def uploads(self, version: int) -> dict[Kind, Payload]:
        """What of a version goes to the bus."""
        found = self._writer.uploads(version)
        if self._momentum_payload is not None and self._writer.is_alone(version):
            found["momentum"] = self._momentum_payload
        return found

    def published(self, head: Head, staged: Mapping[Kind, Staged]) -> Published:
        """What the next head names. head: of the version before; staged: all uploads."""
        return self._writer.published(head, staged)


class DraftWriter:
    """A draft while the outer step is taken."""

    def __init__(self, step: StepWriter, base: Float32 | None, momentum: Payload | None) -> None:
        self._step, self._momentum = step, momentum
        self.base = base
        """(elements,) what the step is subtracted from; None: the step itself is to be written."""

    def reduced(self) -> None:
        """All of the pseudogradient is in the draft's values, and no element of it has been stepped yet."""
        self._step.reduced()

    def written(self, stop: int) -> None:
        """All elements before `stop`, and of the momentum, are as the outer step makes them."""
        done = self._step.written(stop)
        if self._momentum is not None:
            self._momentum.grow_to(4 * done)


# --- what goes in and what comes out --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delta:
    """A sound, complete delta: flat vector (elements,) as it is merged and its per-tensor norms."""

    offer: Offer
    values: Vector
    norms: npt.NDArray[np.float64]
    stale: "Delta | None" = None
    """As it came, where this is it rebased."""

    @property
    def norm(self) -> float:
        """L2 norm of the whole delta."""
        return float(np.linalg.norm(self.norms))

    @property
    def sent(self) -> "Delta":
        """As it came."""
        return self.stale or self


@dataclass(frozen=True, slots=True)
class Merged:
    """What the fragment becomes if the commit succeeds."""

    version: int
    digest: bytes
    theta: Float32
    momentum: Float32 | None
    contributions: tuple[Contribution, ...]
    merged: tuple[MergedBase, ...]
    norms: tuple[float, ...]
    """As `Head`."""
    norm: float
    directions: Float64
    """As `merge.Reduced`."""
    orthogonal: Float32 | None = None
    """As `Stepped`."""
    finite: bool = True
    """Values and momentum have no NaN and no infinity: it may be committed."""


def finite(theta: Float32, momentum: Float32 | None) -> bool:
    """Whether values (elements,) and momentum (elements,) have no NaN and no infinity."""
    return all_finite(theta) and (momentum is None or all_finite(momentum))


# --- the outer step ------------------------------------------------------------------------------------


class Stepped(NamedTuple):
    """Values and momentum after an outer step, and what its merge measured."""

    theta: Float32
    momentum: Float32 | None
    reduced: Reduced
    orthogonal: Float32 | None = None
    """(matrix elements,) as `outer.matrix_blocks` found it; None for a step that orthogonalises nothing."""


def orthogonalises(layout: FragmentLayout, sync: SyncSpec, mu: float) -> bool:
    """Whether an outer step with this momentum turns matrices: while learners are only averaged it does not."""
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
    """Merge and take the outer step, in new memory: `theta` and `before` stay (paper: RDA, outer optimizer).

    Args:
        layout, deltas, norms, shares, recorded, factors: as `merge.Sum.close`.
        sync: has the chunk size.
        outer: learning rate and momentum, as `outer.outer_at`.
        theta: (elements,) values at the base.
        before: (elements,) momentum before the step; None: zeros.
        draft: where to, if that is here already; the first of the deltas may be in its sum.
        recorded_step: what a step of matrices goes by instead of what is computed here; as `Stepped.orthogonal`.
    """
    lr, mu = outer
    into = draft or Draft(layout, sync)
    orthogonal = orthogonalises(layout, sync, mu)
    into.prepare(mu, orthogonal)
    close = partial(into.sum.close, deltas, norms, shares, recorded, factors=factors)
    writer = into.step_writer(theta, before, lr, mu)
    if not mu:  # none is kept while it has no say: the first step with momentum is as the first of a run
        averaged = layout.averaged
        plain = AveragingStep(layout, theta, into.theta) if averaged else PlainStep(writer.base, into.theta, lr)
        return Stepped(into.theta, None, _elementwise(plain, writer, close))
    assert into.momentum is not None  # noqa: S101  # it is prepared
    step = NesterovStep(writer.base, Momentum(before, into.momentum, mu), into.theta, lr)
    if not orthogonal:
        return Stepped(into.theta, into.momentum, _elementwise(step, writer, close))
    # A matrix is orthogonalised as a whole, so once all of it is merged: a second pass.
    reduced = close()
    writer.reduced()
    found = np.empty(matrix_elements(layout), np.float32)
    for stop in matrix_blocks(layout, step, found, recorded_step):
        writer.written(stop)
    return Stepped(into.theta, into.momentum, reduced, found)


def _elementwise(step: PlainStep, writer: DraftWriter, close: Callable[..., Reduced]) -> Reduced:
    """A step that goes over each block once, while it is in the cache."""

    def stepped(start: int, stop: int) -> None:
        step.block(start, stop)
        writer.written(stop)

    return close(each_block=stepped)


# --- the fragment --------------------------------------------------------------------------------------


class FragmentState:
    """Global values, momentum and the norms seen, at one version.

    theta: flat float32 vector (elements,). momentum: as theta, or None: zeros. before: theta of the version before, by
    which stale deltas are rebased; None where that was made by another owner, or in an earlier life of this one.
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
        """As `Head`."""
        self.before: Float32 | None = None

    def judge(self, offer: Offer, values: Vector, norms: Float64) -> Delta | tuple[RefusalReason, str]:
        """A downloaded delta with its `delta_norms`, taken here: a peer's word is not. Or why it is refused."""
        delta = Delta(offer, values, norms)
        if not np.isfinite(delta.norm):
            return RefusalReason.NON_FINITE, "the delta has elements that are not finite"
        usual = median(self.norms) if len(self.norms) >= MERGES_NEEDED else None
        if usual is not None and delta.norm <= ABSURD_NORM_FACTOR * usual:
            return delta
        # A rate that warms up makes the first merges' deltas thousands of times shorter than all later ones: what moves
        # the values by no more than their own size is never absurd. Where too little is known, by many times their own.
        own = max(float(np.linalg.norm(self.theta)), LEAST_RMS * np.sqrt(self.layout.elements))
        if delta.norm <= (own if usual is not None else ABSURD_NORM_FACTOR * own):
            return delta
        known = "" if usual is None else f", the running median {usual:.3g}"
        return RefusalReason.ABSURD_NORM, f"norm {delta.norm:.3g}; the fragment's own is {own:.3g}{known}"

    def is_stale(self, delta: Delta) -> bool:
        """Whether a delta was measured from an older version than this."""
        return delta.offer.header.base_version < self.version

    def rebases(self, delta: Delta) -> bool:
        """Whether a delta is still to be rebased before it is summed: it is stale, and the version before is known."""
        return self.before is not None and delta.stale is None and self.is_stale(delta)

    def rebased(self, delta: Delta) -> Delta:
        """A delta as it is merged into this version: one that `rebases`, measured from its values, or as it is."""
        if self.before is None or not self.rebases(delta):
            return delta
        return Delta(delta.offer, *rebase(self.layout, delta.values, self.theta, self.before), stale=delta)

    def outer(self, deltas: Sequence[Delta]) -> tuple[float, float]:
        """Outer learning rate and momentum of the step that merges these."""
        return outer_at(self.sync, self.version, (delta.offer.header.steps for delta in deltas), self.interval)

    def shares(self, deltas: Sequence[Delta]) -> tuple[float, ...]:
        """`merge_shares` of a window's deltas."""
        counters = [(d.offer.header.steps, d.offer.header.tokens) for d in deltas]
        return merge_shares(counters, self.sync.weights, interval=self._interval_in_force())

    def _interval_in_force(self) -> int:
        return interval_in_force(self.sync, self.version, self.interval)

    def factors(self, deltas: Sequence[Delta]) -> tuple[float, ...]:
        """`algorithm.clip_factors` of a window's deltas, each as `rebased` has it."""
        return clip_factors([delta.norm for delta in deltas], self.sync.delta_clip)

    def merge(self, deltas: Sequence[Delta], before: Sequence[MergedBase], draft: Draft | None = None) -> Merged:
        """Token-weighted merge and the outer step (paper: merge weight, RDA, outer optimizer).

        Args:
            deltas: M_t, each as `rebased` has it, in the order in which they are summed.
            before: the head's record of merged bases.
            draft: memory for the outcome; the first of the deltas may be in its sum.
        """
        draft = draft or Draft(self.layout, self.sync)
        headers, interval = [d.offer.header for d in deltas], self._interval_in_force()
        weights = merge_weights([(h.steps, h.tokens) for h in headers], self.sync.weights, interval=interval)
        stepped = self.step(deltas, self.shares(deltas), draft)
        version, factors = self.version + 1, self.factors(deltas)
        # Older bases than the last one are refused as stale anyway: their record can go.
        merged = {(m.learner, m.incarnation): m for m in before if m.base_version >= version - 1}
        for h in headers:
            merged[h.learner, h.incarnation] = MergedBase(
                learner=h.learner, incarnation=h.incarnation, base_version=h.base_version, tokens=h.tokens
            )
        return Merged(
            version=version,
            digest=draft.digest,
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
        """Merge and take the outer step into `draft`; research puts another one in its place."""
        values, norms, factors = [d.values for d in deltas], [d.norms for d in deltas], self.factors(deltas)
        at = self.layout, self.sync, self.outer(deltas), self.theta, self.momentum
        return outer_step(*at, values, norms, shares, draft=draft, factors=factors)

    def advance(self, merged: Merged) -> None:
        """The commit succeeded."""
        self.version, self.digest, self.before = merged.version, merged.digest, self.theta
        self.theta, self.momentum = merged.theta, merged.momentum
        self.norms = merged.norms
