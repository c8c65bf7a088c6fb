"""Whose deltas disagree with all others' again and again: measured on each window, kept over all of them. Pure.

Learners of one run pull the same way: the cosine of a delta with the mean of the others' is well above 0. One delta
alone tells little. A learner's *standing* is its cosines, each as a share of the window's usual one, smoothed. Near 0,
or below, it is *at odds*: it sends noise, or pulls against the others.

Nobody is judged by fewer than `LEAST` deltas of one window, nor by those of half of the learners that were seen
`LATELY`: a few could meet one of the others alone. And a minority alone is ever at odds: the usual cosine is the lower
median, and a learner's own is at least what half of the others have with it. So whoever is outnumbered cannot make the
others look as if they were the ones.
"""

from collections.abc import Mapping, Sequence
from statistics import median_low

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.wire import MAX_LEARNERS
from diloco.pipeline.payload.codec import Vector

Float64 = npt.NDArray[np.float64]

LEAST = 3
"""Deltas of one window by which a learner can be judged: of two that disagree nobody can tell which one errs."""
SAMPLE = 64 * 1024
"""Elements of a fragment that are looked at, at most: a cosine of more comes out to 1 / sqrt(SAMPLE) = 0.004."""
SAMPLES_BYTES = 64 * 2**20
"""That all deltas' samples take together, at most: of more than 128 deltas each has a smaller one."""
RUN = 256
"""Elements of one stretch of them."""
LEAST_USUAL = 0.05
"""A window whose usual cosine is below this tells of nobody: all pull their own way."""
LATELY = 32
"""Windows: a learner in none of so many has left, or cannot follow, and does not count among those who judge."""
FALLS, RISES = 1 / 8, 1 / 32
"""Weights of a new share in the standing. It falls faster than it rises: who disagrees in every third window is at odds
too, and who was at odds has to agree for a while."""
AT_ODDS, AGREES = 0.05, 0.15
"""A standing below the first is at odds, until it is above the second."""


# --- one window ------------------------------------------------------------------------------------------


def sample_of(deltas: int) -> int:
    """Elements to look at of each of so many deltas."""
    return max(1, min(SAMPLE, SAMPLES_BYTES // (8 * deltas)) // RUN) * RUN


def places(elements: int, seed: int, sample: int = SAMPLE) -> npt.NDArray[np.int64] | None:
    """Which stretches of a fragment to look at, by number: others with each seed, from all parts. None: all of it.

    The seed is to be drawn once the deltas are here: else they could be as the others' where it is looked.
    """
    if elements <= sample:
        return None
    bounds = np.linspace(0, elements // RUN, sample // RUN + 1)
    drawn = bounds[:-1] + np.random.default_rng(seed).random(len(bounds) - 1) * np.diff(bounds)
    return np.unique(drawn.astype(np.int64))


def _sampled(delta: Vector, at: npt.NDArray[np.int64] | None) -> Float64:
    if at is None:
        return np.asarray(delta[0 : len(delta)], np.float64)
    if isinstance(delta, np.ndarray):
        rows = delta[: len(delta) - len(delta) % RUN].reshape(-1, RUN)
        return rows[at].astype(np.float64).reshape(-1)
    return np.concatenate([delta[RUN * one : RUN * (one + 1)] for one in at.tolist()]).astype(np.float64)


def gram(deltas: Sequence[Vector], at: npt.NDArray[np.int64] | None) -> Float64:
    """Scalar products (M, M) of deltas, each (elements,) finite, over some of their elements (`places`)."""
    sampled = np.stack([_sampled(delta, at) for delta in deltas])
    products: Float64 = sampled @ sampled.T
    return products


def agreements(products: Float64) -> list[float | None]:
    """How far each of M deltas agrees with the others, -1 to 1; None where that cannot be told.

    It is the cosine with the mean of the others' directions, or the one that half of the others have with it at least,
    if that is higher: a few that pull against all count for half of the mean where learners are few.
    """
    lengths = np.sqrt(np.diag(products))
    some = [m for m, length in enumerate(lengths) if length > 0]
    found: list[float | None] = [None] * len(lengths)
    if len(some) < LEAST:
        return found
    cosines = products[np.ix_(some, some)] / np.outer(lengths[some], lengths[some])
    own, rows = np.diag(cosines).copy(), cosines.sum(axis=1)
    others = rows.sum() - 2 * rows + own  # of each: the squared length of the others' sum
    others[others < len(some) ** 2 * np.finfo(np.float64).eps] = np.inf  # they add up to nothing, but for rounding
    with_mean = (rows - own) / np.sqrt(others)
    np.fill_diagonal(cosines, np.inf)  # behind all others
    middle = (len(some) - 1) // 2
    with_half = np.partition(cosines, middle, axis=1)[:, middle]
    for m, cosine in zip(some, np.clip(np.maximum(with_mean, with_half), -1.0, 1.0).tolist(), strict=True):
        found[m] = cosine
    return found


def judged(deltas: Sequence[Vector], at: npt.NDArray[np.int64] | None) -> list[float | None]:
    """The `agreements` of deltas, by some of their elements (`places`)."""
    return agreements(gram(deltas, at))


# --- over windows ------------------------------------------------------------------------------------------


class Standings:
    """The standings of a run's learners, as one syncer's windows show them. A new learner has 1.

    At most as many as a run may have are remembered; the one that was longest in no window goes.
    """

    def __init__(self) -> None:
        self._standings: dict[str, float] = {}
        self._low: set[str] = set()
        self._windows = 0
        self._seen: dict[str, int] = {}
        """By learner the last window that it was in, of the last `LATELY`."""

    def observe(self, found: Mapping[str, float | None]) -> None:
        """One window's `agreements` by learner. Zeros agree with nobody, where others do."""
        self._windows += 1
        self._seen |= dict.fromkeys(found, self._windows)
        self._seen = {learner: last for learner, last in self._seen.items() if last > self._windows - LATELY}
        known = [cosine for cosine in found.values() if cosine is not None]
        if len(known) < LEAST or 2 * len(known) <= len(self._seen) or (usual := median_low(known)) < LEAST_USUAL:
            return
        for learner, cosine in found.items():
            before, share = self._standings.pop(learner, 1.0), min(1.0, max(-1.0, (cosine or 0.0) / usual))
            now = before + (FALLS if share < before else RISES) * (share - before)
            self._standings[learner] = now
            if now < AT_ODDS:
                self._low.add(learner)
            elif now > AGREES:
                self._low.discard(learner)
        while len(self._standings) > MAX_LEARNERS:
            gone = next(iter(self._standings))
            del self._standings[gone]
            self._low.discard(gone)

    def after(self, found: Mapping[str, float | None]) -> "Standings":
        """What they will be once one more window is observed."""
        later = Standings()
        later._standings, later._low = self._standings.copy(), self._low.copy()
        later._windows, later._seen = self._windows, self._seen.copy()
        later.observe(found)
        return later

    def of(self, learner: str) -> float:
        """A learner's, -1 to 1."""
        return self._standings.get(learner, 1.0)

    @property
    def at_odds(self) -> frozenset[str]:
        """Learners at odds with the others: fewer than half of those seen lately, those of the lowest standing.

        Whoever was at odds and has stayed away since still is: it is not merged once for coming back.
        """
        here = sorted(self._low & self._seen.keys(), key=self.of)
        return frozenset(here[: max(0, (len(self._seen) - 1) // 2)]) | (self._low - self._seen.keys())
