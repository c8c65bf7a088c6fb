"""The merge and the outer step once more, as plainly as the paper has them, to check the production code by. Pure.

float64 throughout, no blocks, no shared code: a fault in `syncer.merge` or `syncer.outer`, or a payload that is not
the one its learner published, shows as a difference.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeline.fragments import FragmentLayout
from pipeline.messages import SyncSpec

Float64 = npt.NDArray[np.float64]


def merge_weights(steps: Sequence[int], tokens: Sequence[int]) -> Float64:
    """Tokens times tokens per step, normalised (paper, token weights): (contributions,)."""
    raw = np.array([t * t / s for s, t in zip(steps, tokens, strict=True)])
    weights: Float64 = raw / raw.sum()
    return weights


def pseudogradient(layout: FragmentLayout, deltas: Sequence[Float64], weights: Float64) -> Float64:
    """Weighted mean, or per tensor mean length times mean direction (paper, RDA): (elements,)."""
    merged: Float64 = np.einsum("i,ij->j", weights, np.stack(deltas))
    if len(deltas) == 1:
        return merged
    for slot in layout.slots:
        if slot.tensor.rule != "rda":
            continue
        parts = [delta[slot.start : slot.stop] for delta in deltas]
        lengths = [float(np.linalg.norm(part)) for part in parts]
        direction = np.sum([w * part / n for w, part, n in zip(weights, parts, lengths, strict=True) if n > 0], axis=0)
        size = float(np.linalg.norm(direction))
        mean_length = float(np.dot(weights, lengths))
        merged[slot.start : slot.stop] = direction * (mean_length / size) if size > 0 else 0.0
    return merged


def outer_step(theta: Float64, momentum: Float64, gradient: Float64, sync: SyncSpec) -> tuple[Float64, Float64]:
    """SGD with Nesterov momentum (paper, outer optimizer): new theta and momentum, (elements,) each."""
    momentum = sync.outer_momentum * momentum + gradient
    return theta - sync.outer_lr * (gradient + sync.outer_momentum * momentum), momentum
