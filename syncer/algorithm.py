"""The syncer's algorithm (paper: Decoupled DiLoCo, arXiv:2604.21428), in float64 and whole arrays. Pure numpy.

One sync of a fragment, whose global values are Theta and whose outer momentum is b:

    wait until K learners have reported, then `grace` longer: M_t are those that are in
    Delta_m = Theta - theta_m, for each m of M_t: its pseudogradient, with c_steps and c_tokens since its base;
        of one that measured it from the version before: Delta_m = rebased(Delta_m, Theta, that version's Theta)
    w = merge_weights(c), of sum 1
    Delta_m = f_m Delta_m, f = clip_factors(||Delta_m||), where the run clips
    Delta = pseudogradient(Delta_m, w), each tensor by its rule in `MERGE_RULES`
    Theta, b = outer_step(Theta, b, Delta), each tensor by its optimizer in `OUTER`; average-only ones by `averaged`
    publish Theta to all learners: each overwrites its theta_m with it when it is ready

The syncer takes token weights and grace from here. `merge` and `outer` are the other formulas in float32, in blocks
that stay in the cache, and tests hold them to these. The simulated world's oracle checks each commit by these.
"""

from collections.abc import Callable, Sequence
from statistics import median_low
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.wire import AVERAGED, MergeRule, OuterName, WeightsName
from diloco.pipeline.payload.codec import Vector

Float64 = npt.NDArray[np.float64]
Float = TypeVar("Float", npt.NDArray[np.float32], npt.NDArray[np.float64])

CANCELLED = 1e-6
"""Directions whose weighted mean is shorter than this cancel: it is rounding noise."""
HALLEY = (86.2, 1814.76, 1899.96)
"""a, b, c of x -> x (a + b x^2) / (1 + c x^2), which takes singular values from 0.005 to 1 to between 0.41 and 1
(Nakatsukasa, Bai and Gygi, Optimizing Halley's iteration for computing the matrix polar decomposition, 2010)."""


# --- merge weights ----------------------------------------------------------------------------------------


def token_weight(steps: int, tokens: float) -> float:
    """w = c_tokens * (c_tokens / c_steps): quantity times quality (paper, token weights). Both are positive."""
    return tokens * (tokens / steps)


def equal_weight(steps: int, tokens: float) -> float:
    """w = 1: each learner alike."""
    return 1.0


WEIGHTS: dict[WeightsName, Callable[[int, float], float]] = {"tokens": token_weight, "equal": equal_weight}
MOST_RATE = 8
"""Tokens a step count up to so many times the median: a node of eight GPUs trains so many times what one does."""
MOST_STEPS = 2
"""Steps count up to so many times the most of the others, or the interval. Whoever has trained far more than they, as
alone in a night without a quorum, has nearly all of the weight all the same."""


def counted(counters: Sequence[tuple[int, int]], interval: int) -> list[tuple[int, float]]:
    """(c_steps, c_tokens) as they count for weights: of learners that are alike, as they are; ours.

    They are each learner's own words, and nobody else can know them. So they count within bounds of the others'.

    Args:
        counters: of each contribution.
        interval: inner steps between two syncs, on the base that is merged into.
    """
    usual = median_low([tokens / steps for steps, tokens in counters])
    second, most = sorted((0, *(steps for steps, _ in counters)))[-2:]
    found: list[tuple[int, float]] = []
    for steps, tokens in counters:
        kept = min(steps, MOST_STEPS * max(interval, second if steps == most else most))
        found.append((kept, min(tokens if kept == steps else tokens / steps * kept, MOST_RATE * usual * kept)))
    return found


def merge_weights(counters: Sequence[tuple[int, int]], rule: WeightsName = "tokens", *, interval: int) -> Float64:
    """w / sum w (M,), from (c_steps, c_tokens) of each contribution since its base; interval: as `counted`."""
    w = np.array([WEIGHTS[rule](steps, tokens) for steps, tokens in counted(counters, interval)])
    normalised: Float64 = w / w.sum()
    return normalised


# --- stale deltas -----------------------------------------------------------------------------------------


def rebased(delta: Float64, theta: Float64, before: Float64) -> Float64:
    """Theta - theta_m (elements,), where delta = before - theta_m: a learner's values, measured from the present ones.

    The paper measures all pseudogradients at the syncer, from its present Theta. Here a learner measures its own, from
    the base that it trained from.
    """
    theta_m = before - delta
    pseudogradient: Float64 = theta - theta_m
    return pseudogradient


# --- deltas that are longer than others -------------------------------------------------------------------

LEAST_FOR_MEDIAN = 3
"""Contributions. The median of two is the shorter one, which one alone of them would choose."""


def clip_factors(norms: Sequence[float], multiple: float) -> tuple[float, ...]:
    """f_m (M,), at most 1: none is longer than so many times the median of all; ours.

    The lower median of an even number: more than half would have to be long to move it beyond the others' longest, and
    half of them to be short to move it below the others' shortest. No rule on norms alone resists both halves: of
    (1, 1, x, x) it cannot tell who is honest.

    Args:
        norms: of the whole deltas of a fragment, as they are merged.
        multiple: 0: any length is merged.
    """
    most = multiple * median_low(norms) if len(norms) >= LEAST_FOR_MEDIAN else 0.0
    return tuple(most / norm if 0 < most < norm else 1.0 for norm in norms)


# --- merge rules: Delta_m of one tensor, (M, *shape), and w, (M,), to its Delta, (*shape) -----------------


def phi(x: Float64, zero: float = 0.0) -> Float64:
    """Direction x / ||x||; phi(0) = 0, where 0 is what is no longer than `zero`."""
    length = float(np.linalg.norm(x))
    return x / length if length > zero else np.zeros_like(x)


def mean(deltas: Float64, w: Float64) -> Float64:
    """sum w_m Delta_m."""
    merged: Float64 = np.einsum("m,m...->...", w, deltas)
    return merged


def rda(deltas: Float64, w: Float64) -> Float64:
    """Radial-directional averaging: (sum w_m ||Delta_m||) * phi(sum w_m phi(Delta_m)).

    It keeps the length R of one learner's pseudogradient. Learners' are nearly orthogonal, so that a mean of M of them
    would have about R / sqrt(M).
    """
    length = sum(w_m * np.linalg.norm(delta) for w_m, delta in zip(w, deltas, strict=True))
    merged: Float64 = length * phi(mean(np.stack([phi(delta) for delta in deltas]), w), CANCELLED)
    return merged


def rda_row(deltas: Float64, w: Float64) -> Float64:
    """`rda` of each row of a tensor (all but its first dimension); ours, the paper does not say which granularity."""
    merged: Float64 = np.zeros_like(deltas[0])
    for row in np.ndindex(merged.shape[:1]):
        merged[row] = rda(deltas[:, *row], w)
    return merged


MERGE_RULES: dict[MergeRule, Callable[[Float64, Float64], Float64]]
MERGE_RULES = {"mean": mean, "rda": rda, "rda-row": rda_row, "average": mean, "variance": mean}


def pseudogradient(layout: FragmentLayout, deltas: Sequence[Vector], w: Float64) -> Float64:
    """Delta (elements,) of a fragment from Delta_m, each (elements,): each tensor by its own rule."""
    merged = np.zeros(layout.elements)
    for slot in layout.slots:
        part, shape = slice(slot.start, slot.stop), slot.shape
        tensors = np.stack([np.asarray(delta[part], np.float64).reshape(shape) for delta in deltas])
        merged[part] = MERGE_RULES[slot.tensor.rule](tensors, w).reshape(-1)
    return merged


# --- outer optimizers: Theta, b and Delta of one tensor, to the new Theta and b ------------------------------


def nesterov(theta: Float, b: Float, delta: Float, lr: float, mu: float) -> tuple[Float, Float]:
    """SGD with Nesterov momentum: b = mu b + Delta; Theta = Theta - lr (Delta + mu b) (paper, outer optimizer)."""
    b = mu * b + delta
    step: Float = delta + mu * b
    return theta - lr * step, b


def halley_values(values: Float64) -> Float64:
    """Singular values (n,) after one iteration, of those of a matrix of any length.

    They are scaled so that their fourth powers add up to 1, as the squares of the Gram matrix do. Then none is above 1,
    and the largest is nearer to 1 than by the Frobenius length of the matrix: the more so, the wider the matrix is.
    """
    a, b, c = HALLEY
    given = np.sqrt(phi(values**2))
    turned: Float64 = given * (a + b * given**2) / (1 + c * given**2)
    return turned


def orthogonalised(matrix: Float64) -> Float64:
    """The same singular vectors and Frobenius length; singular values, times a number, by `halley_values`."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    same: Float64 = (left * phi(halley_values(values))) @ right * np.linalg.norm(values)
    return same


def halley(theta: Float64, b: Float64, delta: Float64, lr: float, mu: float) -> tuple[Float64, Float64]:
    """`nesterov` of a matrix whose step is orthogonalised (after Jordan et al., Muon, 2024); ours."""
    b = mu * b + delta
    return theta - lr * orthogonalised(delta + mu * b), b


OUTER: dict[OuterName, Callable[[Float64, Float64, Float64, float, float], tuple[Float64, Float64]]]
OUTER = {"nesterov": nesterov, "halley": halley}


def averaged(theta: Float64, delta: Float64, rule: MergeRule) -> Float64:
    """Theta of an average-only tensor: Theta - Delta, the mean of the learners' values; ours.

    A mean of variances is none below 0. Rounding, and a stale delta that was not rebased, may make it so; then it is 0.
    """
    mean_of_values: Float64 = theta - delta
    return np.maximum(mean_of_values, 0.0) if rule == "variance" else mean_of_values


def outer_step(
    layout: FragmentLayout, theta: Float64, b: Float64, delta: Float64, lr: float, mu: float, outer: OuterName
) -> tuple[Float64, Float64]:
    """New Theta and b of a fragment, (elements,) each: matrices by `outer`, average-only tensors by `averaged`.

    All else by `nesterov`. mu = 0 averages learners: no momentum is gathered, and nothing is orthogonalised.
    """
    after, momentum = theta - lr * delta, np.zeros_like(b)
    for slot in layout.slots:
        part, optimizer = slice(slot.start, slot.stop), OUTER[outer if slot.tensor.matrix else "nesterov"]
        if slot.tensor.rule in AVERAGED:
            after[part] = averaged(theta[part], delta[part], slot.tensor.rule)
            continue
        if not mu:
            continue
        of = [x[part].reshape(slot.shape) for x in (theta, b, delta)]
        new = optimizer(of[0], of[1], of[2], lr, mu)
        after[part], momentum[part] = new[0].reshape(-1), new[1].reshape(-1)
    return after, momentum


# --- the grace window ---------------------------------------------------------------------------------------

STEPS_VARY = 0.25
"""Steps take longer than on average by so much, now and then. Who misses a merge for it loses an interval."""


def grace(step_time: float, quorum_time: float, sync_time: float, tau: int, gamma: float, latency: float) -> float:
    """Seconds to wait beyond the quorum (paper, adaptive grace window): gamma * slack, and never below 0.

    slack = tau * step_time - (quorum_time + sync_time) is the compute time that still hides a sync. The cap is one
    step that takes `STEPS_VARY` longer, and the latency of a header: a straggler that follows has done so by then.

    Args:
        step_time: of a learner's inner step, s.
        quorum_time: from the window's opening to the K-th header, s.
        sync_time: uploads, merge, outer step, commit and the learners' pulls, s.
        tau: inner steps that a sync may hide behind.
        gamma: share of the slack, below 1.
        latency: from a learner's decision to publish to its header at the syncer, s.
    """
    slack = tau * step_time - (quorum_time + sync_time)
    return max(0.0, min(gamma * slack, (1 + STEPS_VARY) * step_time + latency))
