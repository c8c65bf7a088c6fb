"""One global fragment and its outer state: judging deltas, merging them, taking the outer step. Pure: numpy only.

Nothing here changes before a commit has succeeded: `merge` returns what the fragment would become, `advance`
makes it so. A refused commit therefore leaves the state as it was.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.head import MergedBase
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.tape import Contribution, RefusalReason
from diloco.pipeline.payload.codec import Vector
from diloco.pipeline.ramps import outer_at
from diloco.pipeline.transfer.outer_state import OuterState
from diloco.syncer.admission import Offer
from diloco.syncer.algorithm import merge_weights
from diloco.syncer.merging.draft import Draft, DraftWriter
from diloco.syncer.merging.merge import Reduced, Sum, merge_shares
from diloco.syncer.merging.norms import Float64, all_finite
from diloco.syncer.merging.outer import Momentum, NesterovStep, PlainStep, matrix_elements, muon_blocks

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
    outer_state: OuterState
    contributions: tuple[Contribution, ...]
    merged: tuple[MergedBase, ...]
    norm: float
    directions: Float64
    """As `merge.Reduced`."""
    orthogonal: npt.NDArray[np.float32] | None = None
    """As `Stepped`."""
    finite: bool = True
    """Values and outer state have no NaN and no infinity: it may be committed."""


def finite(theta: npt.NDArray[np.float32], outer_state: OuterState) -> bool:
    """Whether values (elements,) and outer state have no NaN and no infinity."""
    return all_finite(theta) and all(map(all_finite, outer_state.values()))


class Stepped(NamedTuple):
    """Values and outer state after an outer step, and what its merge measured."""

    theta: npt.NDArray[np.float32]
    outer_state: OuterState
    reduced: Reduced
    orthogonal: npt.NDArray[np.float32] | None = None
    """(matrix elements,) as `outer.muon_blocks` found it; None for a step that orthogonalises nothing."""


def orthogonalises(layout: FragmentLayout, sync: SyncSpec, mu: float) -> bool:
    """Whether an outer step with this momentum is Muon's: while learners are only averaged it is not."""
    return sync.outer == "muon" and mu > 0 and matrix_elements(layout) > 0


def outer_step(
    layout: FragmentLayout,
    sync: SyncSpec,
    outer: tuple[float, float],
    theta: npt.NDArray[np.float32],
    outer_state: OuterState,
    deltas: Sequence[Vector],
    norms: Sequence[Float64],
    shares: Sequence[float],
    recorded: Float64 | None = None,
    draft: Draft | None = None,
    recorded_step: npt.NDArray[np.float32] | None = None,
) -> Stepped:
    """Merge and take the outer step, in new memory: `theta` and `outer_state` stay (paper: RDA, outer optimizer).

    Args:
        layout, deltas, norms, shares, recorded: as `merge.Sum.close`.
        sync: has the chunk size.
        outer: learning rate and momentum, as `ramps.outer_at`.
        theta: (elements,) values at the base.
        outer_state: before the step; empty while all zero.
        draft: where to, if that is here already; the first of the deltas may be in its sum.
        recorded_step: what a Muon step goes by instead of what is computed here; as `Stepped.orthogonal`.
    """
    lr, mu = outer
    into = draft or Draft(layout, sync)
    orthogonal = orthogonalises(layout, sync, mu)
    into.prepare(mu, orthogonal)
    writer = into.begin(theta, outer_state, lr, mu)
    if not mu:  # no state is kept while it has no say: the first step with momentum is as the first of a run
        plain = PlainStep(writer.base, into.theta, lr)
        return Stepped(into.theta, {}, _elementwise(plain, writer, into.sum, deltas, norms, shares, recorded))
    momentum = Momentum(outer_state.get("momentum"), into.outer_state["momentum"], mu)
    step = NesterovStep(writer.base, momentum, into.theta, lr)
    if not orthogonal:
        reduced = _elementwise(step, writer, into.sum, deltas, norms, shares, recorded)
        return Stepped(into.theta, into.outer_state, reduced)
    # A matrix is orthogonalised as a whole, so once all of it is merged: a second pass.
    reduced = into.sum.close(deltas, norms, shares, recorded)
    writer.reduced()
    found = np.empty(matrix_elements(layout), np.float32)
    for stop in muon_blocks(layout, step, found, recorded_step):
        writer.written(stop)
    return Stepped(into.theta, into.outer_state, reduced, found)


def _elementwise(
    step: PlainStep,
    writer: DraftWriter,
    running: Sum,
    deltas: Sequence[Vector],
    norms: Sequence[Float64],
    shares: Sequence[float],
    recorded: Float64 | None,
) -> Reduced:
    """A step that goes over each block once, while it is in the cache."""

    def finish(start: int, stop: int) -> None:
        step.block(start, stop)
        writer.written(stop)

    return running.close(deltas, norms, shares, recorded, finish)


class FragmentState:
    """Global values, outer state and the norms seen, at one version.

    theta: flat float32 vector (elements,). outer_state: empty while all zero.
    """

    def __init__(
        self,
        layout: FragmentLayout,
        sync: SyncSpec,
        version: int,
        digest: bytes,
        theta: npt.NDArray[np.float32],
        outer_state: OuterState,
    ) -> None:
        self.layout = layout
        self.sync = sync
        self.version = version
        self.digest = digest
        self.theta = theta
        self.outer_state = outer_state
        self.interval = 0
        """`Head.interval` of this version."""
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
        return outer_at(self.sync, self.version, (delta.offer.header.steps for delta in deltas), self.interval)

    def merge(self, deltas: Sequence[Delta], before: Sequence[MergedBase], draft: Draft | None = None) -> Merged:
        """Token-weighted merge and the outer step (paper: merge weight, RDA, outer optimizer).

        Args:
            deltas: M_t, in the order in which they are summed.
            before: the head's record of merged bases.
            draft: memory for the outcome; the first of the deltas may be in its sum.
        """
        draft = draft or Draft(self.layout, self.sync)
        headers = [d.offer.header for d in deltas]
        counters = [(h.steps, h.tokens) for h in headers]
        weights, shares = merge_weights(counters, self.sync.weights), merge_shares(counters, self.sync.weights)
        stepped = self.step(deltas, shares, draft)
        version = self.version + 1
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
            outer_state=stepped.outer_state,
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
            finite=finite(stepped.theta, stepped.outer_state),
        )

    def step(self, deltas: Sequence[Delta], shares: Sequence[float], draft: Draft) -> Stepped:
        """Merge and take the outer step into `draft`; research puts another one in its place."""
        values, norms = [d.values for d in deltas], [d.norms for d in deltas]
        return outer_step(
            self.layout, self.sync, self.outer(deltas), self.theta, self.outer_state, values, norms, shares, draft=draft
        )

    def advance(self, merged: Merged) -> None:
        """The commit succeeded."""
        self.version, self.digest = merged.version, merged.digest
        self.theta, self.outer_state = merged.theta, merged.outer_state
        self._norms.append(median(c.norm for c in merged.contributions))


MakeFragment = Callable[[FragmentLayout, SyncSpec, int, bytes, npt.NDArray[np.float32], OuterState], FragmentState]
"""`FragmentState`, or something in its place: layout, sync, version, digest, theta, outer state."""
