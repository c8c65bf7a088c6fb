"""Agreement of each delta of a window with the direction of the others, for display. Pure."""

from collections.abc import Sequence

import numpy as np

from diloco.pipeline.payload.codec import Vector

# At most this many elements of each delta are sampled: the sampling error is about 1 / sqrt(SAMPLE) = 0.004.
SAMPLE = 64 * 1024
# Sampled elements of all deltas together (64 MiB): with more than 128 deltas, each has a smaller sample.
SAMPLES = 8 * 1024 * 1024
# A sample consists of stretches of this many adjacent elements.
STRETCH = 256
# Directions whose sum is shorter than this cancel: what is left is rounding.
CANCELLED = 1e-9


def cosines(deltas: Sequence[Vector]) -> list[float | None]:
    """Return the cosine of each delta with the mean direction of the others, -1 to 1; None for a single delta.

    It is 0 if either is zero. Each of the others counts by its direction only, so that a long one does not dominate
    their mean. A large fragment is sampled in stretches that are evenly spaced over it.

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
