"""How far each delta of a window points where the others do: for whoever watches the run. Pure."""

from collections.abc import Sequence

import numpy as np

from diloco.pipeline.payload.codec import Vector

SAMPLE = 64 * 1024
"""Elements of each delta that are looked at, at most: the sampling error is about 1 / sqrt(SAMPLE) = 0.004."""
SAMPLES = 8 * 1024 * 1024
"""Elements of all deltas together (64 MiB): of more than 128 deltas each has a smaller sample."""
STRETCH = 256
"""Elements that lie side by side in a sample."""
CANCELLED = 1e-9
"""Directions whose sum is shorter than this cancel: the rest is rounding."""


def cosines(deltas: Sequence[Vector]) -> list[float | None]:
    """Cosine of each delta with the mean direction of the others, -1 to 1; 0 where either is zero, None for one alone.

    Each other delta counts by its direction alone, so a long one does not decide where the others point. A large
    fragment is sampled in stretches that are evenly spaced over it.

    Args:
        deltas: each (elements,), finite, in any codec.
    """
    if len(deltas) == 1:
        return [None]
    elements, sample = len(deltas[0]), min(SAMPLE, SAMPLES // len(deltas))
    starts, stretch = [0], elements
    if elements > sample:
        starts, stretch = np.linspace(0, elements - STRETCH, sample // STRETCH).astype(int).tolist(), STRETCH
    sampled = np.stack([np.concatenate([delta[at : at + stretch] for at in starts]) for delta in deltas])
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
