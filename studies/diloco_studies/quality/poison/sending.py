"""What learners of the lab send that is not what they learned, or learn what is not the task. Pure: numpy only.

The first `poisoners` learners of a run do so. All of it has a norm that the syncer takes for sound.
"""

import numpy as np
import numpy.typing as npt

from diloco.pipeline.testing.chance import Chance
from diloco_studies.quality.settings import LabRun

Flat = npt.NDArray[np.float32]

TURN = 4
"""Versions of a fragment after which the next one of those that take turns begins."""


class Poison:
    """What one learner does to what it sends; an honest one does nothing."""

    def __init__(self, run: LabRun, number: int) -> None:
        self._run, self._number = run, number
        self._count = run.poisoners or 1
        self._kind = run.poison if run.poison is not None and number < self._count else None
        self._random = np.random.default_rng([run.seed, number])
        self._chance = Chance(run.seed)

    @property
    def shuffles(self) -> bool:
        """Whether it trains on text whose tokens are in random order."""
        return self._kind == "shuffled"

    def shuffled(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of a batch, any shape, in random order."""
        return self._random.permuted(tokens.reshape(-1)).reshape(tokens.shape)

    def values(self, base: Flat, values: Flat, version: int) -> Flat:
        """What it says its values (elements,) are. base: what its delta is measured from, of this version."""
        if self._kind is None or self.shuffles:
            return values
        return np.asarray(base - self._delta(base - values, version), np.float32)

    def _delta(self, delta: Flat, version: int) -> Flat:
        match self._kind:
            case "flipped":
                return -delta
            case "flipped-3":
                return np.float32(-3) * delta
            case "random":
                return self._noise(delta)
            case "turns":
                return -delta if version // TURN % self._count == self._number else delta
            case "weak":
                return np.float32(-0.3) * delta
            case "seldom":
                return -delta if self._chance.share("seldom", self._number, version) < 0.3 else delta
            case _:  # "mixed"
                return np.float32(0.5) * delta + np.float32(0.75**0.5) * self._noise(delta)

    def _noise(self, delta: Flat) -> Flat:
        drawn = self._random.standard_normal(len(delta), np.float32)
        return np.asarray(drawn * np.float32(np.linalg.norm(delta) / np.linalg.norm(drawn)))
