"""Outer steps that are tried out in the lab. Pure numpy.

Each rule gets the pseudogradient D of one fragment's merge and what it kept of its last step, and returns the new
values and what it keeps. theta are the global values, lr and mu the outer learning rate and momentum.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diloco.pipeline.fragments import FragmentLayout
from diloco.syncer.algorithm import nesterov
from diloco.syncer.merging.outer import at_its_length
from diloco_studies.quality.settings import OuterName
from diloco_studies.quality.turns import TURNS, Turn

Float32 = npt.NDArray[np.float32]
Memory = Mapping[str, Float32]
"""Vectors (elements,) that a rule keeps from one step to the next; empty before the first."""

TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Merge:
    """One merge of one fragment, and what a rule is told.

    theta, d: (elements,) global values at the base, and the pseudogradient; neither is written to.
    """

    theta: Float32
    d: Float32
    step: int
    """Outer steps of the fragment since the warm-up, from 0."""
    lr: float
    mu: float
    delay: int
    spread: float
    """Weighted mean of the deltas' squared lengths over the pseudogradient's: 1 where all are alike, M where they are
    orthogonal and of one length."""
    layout: FragmentLayout
    """Says which tensors are matrices."""


Rule = Callable[[Merge, Memory], tuple[Float32, Memory]]


def delayed(merge: Merge, memory: Memory) -> tuple[Float32, Memory]:
    """Delayed Nesterov (Liu et al., Asynchronous Local-SGD Training for Language Modeling, 2024, c = 0).

    Each step goes lr D; every `delay`-th renews the momentum b = mu b + (sum of D since) and goes lr mu b further.
    With a delay of 1 it is Nesterov's. There each D is one worker's, here a whole merge: its rate is `delay` times
    this one.
    """
    total = _kept(memory, "sum", merge.d) + merge.d
    momentum = _kept(memory, "momentum", merge.d)
    if (merge.step + 1) % merge.delay:
        return merge.theta - merge.lr * merge.d, {"momentum": momentum, "sum": total}
    momentum = merge.mu * momentum + total
    step: Float32 = merge.d + merge.mu * momentum
    return merge.theta - merge.lr * step, {"momentum": momentum}


def agreement(merge: Merge, memory: Memory) -> tuple[Float32, Memory]:
    """Nesterov with momentum mu times the cosine of this pseudogradient and the last one; none where they disagree."""
    mu = 0.0
    if "last" in memory:
        last, d = memory["last"].astype(np.float64), merge.d.astype(np.float64)
        mu = merge.mu * max(0.0, float(last @ d) / max(TINY, float(np.linalg.norm(last) * np.linalg.norm(d))))
    theta, momentum = nesterov(merge.theta, _kept(memory, "momentum", merge.d), merge.d, merge.lr, mu)
    return theta, {"momentum": momentum, "last": merge.d}


def extrapolated(merge: Merge, memory: Memory) -> tuple[Float32, Memory]:
    """Nesterov at lr max(1, spread / 2): further where the deltas are long beside their mean (Jhunjhunwala et al.,
    FedExP, 2023, without its constant)."""
    rate = merge.lr * max(1.0, merge.spread / 2)
    theta, momentum = nesterov(merge.theta, _kept(memory, "momentum", merge.d), merge.d, rate, merge.mu)
    return theta, {"momentum": momentum}


def schedule_free(merge: Merge, memory: Memory) -> tuple[Float32, Memory]:
    """Schedule-free SGD (Defazio et al., The Road Less Scheduled, 2024), mu in the place of its beta.

    z goes the plain step, x is the mean of all z, and learners get theta = (1 - mu) z + mu x.
    """
    z = memory.get("z", merge.theta) - merge.lr * merge.d
    x = memory.get("x", merge.theta)
    x = x + 1 / (merge.step + 1) * (z - x)
    return (1 - merge.mu) * z + merge.mu * x, {"z": z, "x": x}


def turned(turn: Turn) -> Rule:
    """Nesterov, with the step of each matrix turned at its own length, as production's orthogonalised step does."""

    def rule(merge: Merge, memory: Memory) -> tuple[Float32, Memory]:
        momentum: Float32 = merge.mu * _kept(memory, "momentum", merge.d) + merge.d
        step: Float32 = merge.d + merge.mu * momentum
        for number, slot in enumerate((s for s in merge.layout.slots if s.tensor.matrix), merge.step + merge.layout.id):
            part = slice(slot.start, slot.stop)
            matrix = step[part].reshape(slot.tensor.shape)
            step[part] = at_its_length(turn(matrix, number), matrix)
        after: Float32 = merge.theta - merge.lr * step
        return after, {"momentum": momentum}

    return rule


RULES: dict[OuterName, Rule] = {
    "delayed": delayed,
    "agreement": agreement,
    "extrapolated": extrapolated,
    "schedule-free": schedule_free,
    **{name: turned(turn) for name, turn in TURNS.items()},
}


def _kept(memory: Memory, name: str, like: Float32) -> Float32:
    return memory[name] if name in memory else np.zeros_like(like)
