"""Reference of the syncer's algorithm (paper: Decoupled DiLoCo, arXiv:2604.21428): pure numpy, float64, whole arrays.

One sync of a fragment, whose global values are Theta and whose outer momentum is b:

    wait until K learners have reported, then up to `grace` longer; M_t is the set that has reported by then
    Delta_m = Theta - theta_m, for each m of M_t: its pseudogradient, with c_steps and c_tokens since its base;
        if m measured it from the version before, and that one's Theta is known: rebased(Delta_m, Theta, that Theta)
    w = merge_weights(c), which sum to 1
    Delta_m = f_m Delta_m, f = clip_factors(||Delta_m||), if the run clips
    Delta = pseudogradient(Delta_m, w), each tensor by its rule in `MERGE_RULES`
    Theta, b = outer_step(Theta, b, Delta), each tensor by its optimizer in `OUTER`; average-only ones by `averaged`
    publish Theta to all learners: each overwrites its theta_m with it when it is ready

The syncer uses clip factors, grace and the recorded merge weights of this module directly. `merge` and `outer`
implement the other formulas in float32, in blocks that stay in the CPU cache; tests compare them with these. The oracle
of the simulated world checks each commit against these.
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

# If the weighted mean of unit directions is shorter than this, they cancel and the mean is rounding noise.
CANCELLED = 1e-6
# a, b, c of x -> x (a + b x^2) / (1 + c x^2), which maps singular values in [0.005, 1] into [0.41, 1]
# (Nakatsukasa, Bai and Gygi, Optimizing Halley's iteration for computing the matrix polar decomposition, 2010).
HALLEY = (86.2, 1814.76, 1899.96)


# --- merge weights ----------------------------------------------------------------------------------------


def token_weight(steps: int, tokens: float) -> float:
    """Return c_tokens * (c_tokens / c_steps), quantity times quality (paper, token weights). Both are positive."""
    return tokens * (tokens / steps)


def equal_weight(steps: int, tokens: float) -> float:
    """Return 1: all learners weigh the same."""
    return 1.0


WEIGHTS: dict[WeightsName, Callable[[int, float], float]] = {"tokens": token_weight, "equal": equal_weight}
# Tokens per step count up to this multiple of the median: a node of eight GPUs trains eight times as much as one GPU.
MAX_RATE = 8
# Steps count up to this multiple of the largest count of the others, or of the interval if that is larger. A learner
# that trained far longer than the others (for instance through a long time without a quorum) still has nearly all the
# weight.
MAX_STEPS = 2


def counted(counters: Sequence[tuple[int, int]], interval: int) -> list[tuple[int, float]]:
    """Return (c_steps, c_tokens) of each contribution as they count for its weight (not in the paper).

    Each learner reports its own counters, and the syncer cannot check them. So they are bounded by those of the others
    (`MAX_STEPS`, `MAX_RATE`). The counters of similar learners are unchanged.

    Args:
        counters: (c_steps, c_tokens) of each contribution, as reported.
        interval: inner steps between two syncs, on the base that is merged into.
    """
    usual = median_low([tokens / steps for steps, tokens in counters])
    second, most = sorted((0, *(steps for steps, _ in counters)))[-2:]
    found: list[tuple[int, float]] = []
    for steps, tokens in counters:
        max_of_others = second if steps == most else most
        kept = min(steps, MAX_STEPS * max(interval, max_of_others))
        found.append((kept, min(tokens if kept == steps else tokens / steps * kept, MAX_RATE * usual * kept)))
    return found


def merge_weights(counters: Sequence[tuple[int, int]], rule: WeightsName = "tokens", *, interval: int) -> Float64:
    """Return w / sum w (M,), from (c_steps, c_tokens) of each contribution since its base; interval: see `counted`."""
    w = np.array([WEIGHTS[rule](steps, tokens) for steps, tokens in counted(counters, interval)])
    normalised: Float64 = w / w.sum()
    return normalised


# --- stale deltas -----------------------------------------------------------------------------------------


def rebased(delta: Float64, theta: Float64, before: Float64) -> Float64:
    """Return Theta - theta_m (elements,), where delta = before - theta_m.

    In the paper the syncer measures all pseudogradients, from its current Theta. Here each learner measures its own,
    from the base that it trained from, so a stale one has to be measured again from the current Theta.
    """
    theta_m = before - delta
    pseudogradient: Float64 = theta - theta_m
    return pseudogradient


# --- deltas that are longer than others -------------------------------------------------------------------

# Contributions needed to clip. The lower median of two is the shorter one, so a single learner would set the bound.
MIN_FOR_MEDIAN = 3


def clip_factors(norms: Sequence[float], multiple: float) -> tuple[float, ...]:
    """Return f_m (M,), at most 1, so that no f_m Delta_m is longer than `multiple` medians (not in the paper).

    The median of an even number is the lower one. To move it beyond the longest honest delta, more than half of the
    deltas would have to be long; to move it below the shortest honest one, half of them would have to be short. No rule
    based only on norms resists both halves: of (1, 1, x, x) it cannot tell which are honest.

    Args:
        norms: L2 norms of the whole deltas of a fragment, as they are merged.
        multiple: bound in medians; 0 means that a delta of any length is merged.
    """
    most = multiple * median_low(norms) if len(norms) >= MIN_FOR_MEDIAN else 0.0
    return tuple(most / norm if 0 < most < norm else 1.0 for norm in norms)


# --- merge rules: Delta_m of one tensor, (M, *shape), and w, (M,), to its Delta, (*shape) -----------------


def phi(x: Float64, zero: float = 0.0) -> Float64:
    """Return the direction x / ||x||, or zeros if ||x|| <= `zero`."""
    length = float(np.linalg.norm(x))
    return x / length if length > zero else np.zeros_like(x)


def mean(deltas: Float64, w: Float64) -> Float64:
    """Return sum w_m Delta_m."""
    merged: Float64 = np.einsum("m,m...->...", w, deltas)
    return merged


def rda(deltas: Float64, w: Float64) -> Float64:
    """Return the radial-directional average (sum w_m ||Delta_m||) * phi(sum w_m phi(Delta_m)).

    It keeps the length R of one learner's pseudogradient. Pseudogradients of different learners are nearly orthogonal,
    so the mean of M of them would have a length of about R / sqrt(M).
    """
    length = sum(w_m * np.linalg.norm(delta) for w_m, delta in zip(w, deltas, strict=True))
    merged: Float64 = length * phi(mean(np.stack([phi(delta) for delta in deltas]), w), CANCELLED)
    return merged


def rda_row(deltas: Float64, w: Float64) -> Float64:
    """Return `rda` of each row (index of the first dimension) of a tensor; the paper does not give a granularity."""
    merged: Float64 = np.zeros_like(deltas[0])
    for row in np.ndindex(merged.shape[:1]):
        merged[row] = rda(deltas[:, *row], w)
    return merged


MERGE_RULES: dict[MergeRule, Callable[[Float64, Float64], Float64]]
MERGE_RULES = {"mean": mean, "rda": rda, "rda-row": rda_row, "average": mean, "variance": mean}


def pseudogradient(layout: FragmentLayout, deltas: Sequence[Vector], w: Float64) -> Float64:
    """Return Delta (elements,) of a fragment from its Delta_m, each (elements,); each tensor is merged by its rule."""
    merged = np.zeros(layout.elements)
    for slot in layout.slots:
        part, shape = slice(slot.start, slot.stop), slot.shape
        tensors = np.stack([np.asarray(delta[part], np.float64).reshape(shape) for delta in deltas])
        merged[part] = MERGE_RULES[slot.tensor.rule](tensors, w).reshape(-1)
    return merged


# --- outer optimizers: Theta, b and Delta of one tensor, to the new Theta and b ------------------------------


def nesterov(theta: Float, b: Float, delta: Float, lr: float, mu: float) -> tuple[Float, Float]:
    """Step by SGD with Nesterov momentum (paper, outer optimizer): b = mu b + Delta; Theta -= lr (Delta + mu b)."""
    b = mu * b + delta
    step: Float = delta + mu * b
    return theta - lr * step, b


def halley_values(values: Float64) -> Float64:
    """Return the singular values (n,) after one Halley iteration, from those of any matrix.

    They are first divided by the square root of the Frobenius norm of the Gram matrix, so that their fourth powers
    add up to 1. Then none is above 1, and the largest is nearer to 1 than it would be if they were divided by the
    Frobenius norm of the matrix itself. The more singular values there are, the greater the difference.
    """
    a, b, c = HALLEY
    given = np.sqrt(phi(values**2))
    turned: Float64 = given * (a + b * given**2) / (1 + c * given**2)
    return turned


def orthogonalised(matrix: Float64) -> Float64:
    """Return a matrix of the same singular vectors and norm, whose singular values are as `halley_values` has them.

    They are multiplied by one factor, which restores the Frobenius norm of the given matrix.
    """
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    same: Float64 = (left * phi(halley_values(values))) @ right * np.linalg.norm(values)
    return same


def halley(theta: Float64, b: Float64, delta: Float64, lr: float, mu: float) -> tuple[Float64, Float64]:
    """Take `nesterov`'s step of a matrix, orthogonalised (after Jordan et al., Muon, 2024; not in the paper)."""
    b = mu * b + delta
    return theta - lr * orthogonalised(delta + mu * b), b


OUTER: dict[OuterName, Callable[[Float64, Float64, Float64, float, float], tuple[Float64, Float64]]]
OUTER = {"nesterov": nesterov, "halley": halley}


def averaged(theta: Float64, delta: Float64, rule: MergeRule) -> Float64:
    """Return Theta - Delta of an average-only tensor, the mean of the learners' values (not in the paper).

    A mean of variances cannot be negative. Rounding, or a stale delta that could not be rebased, may make it so; such
    an element becomes 0.
    """
    mean_of_values: Float64 = theta - delta
    return np.maximum(mean_of_values, 0.0) if rule == "variance" else mean_of_values


def outer_step(
    layout: FragmentLayout, theta: Float64, b: Float64, delta: Float64, lr: float, mu: float, outer: OuterName
) -> tuple[Float64, Float64]:
    """Return the new Theta and b of a fragment, (elements,) each.

    Matrices are stepped by `outer`, average-only tensors by `averaged`, all other tensors by `nesterov`. With mu = 0
    the learners are only averaged: no momentum is gathered, and nothing is orthogonalised.
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

# Steps vary: some take longer than the average by about this share. A learner that missed a merge because of one slow
# step would lose the work of a whole interval.
STEPS_VARY = 0.25


def grace(step_time: float, quorum_time: float, sync_time: float, tau: int, gamma: float, latency: float) -> float:
    """Return the seconds to wait beyond the quorum (paper, adaptive grace window): gamma * slack, never below 0.

    slack = tau * step_time - (quorum_time + sync_time) is the compute time that still hides a sync. The grace is at
    most one step that takes `STEPS_VARY` longer, plus the latency of a header: a straggler that follows the window has
    published by then.

    Args:
        step_time: duration of an inner step of the slowest expected learner, s.
        quorum_time: from the window's opening to the K-th header, s.
        sync_time: uploads, merge, outer step, commit and the learners' pulls, s.
        tau: inner steps that a sync may hide behind.
        gamma: share of the slack, below 1.
        latency: from a learner's decision to publish to its header at the syncer, s.
    """
    slack = tau * step_time - (quorum_time + sync_time)
    return max(0.0, min(gamma * slack, (1 + STEPS_VARY) * step_time + latency))
