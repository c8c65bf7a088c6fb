"""The world a run lives in, as functions of its seed: how long steps take, and who fails when. Pure."""

import math
from collections.abc import Iterator

from diloco_studies.quality.settings import LabRun
from diloco_studies.virtual.chance import Chance


class Schedule:
    """Speeds and failures of all learners of one run; the same for every method."""

    def __init__(self, run: LabRun) -> None:
        self._run = run
        self._chance = Chance(run.seed)

    def step_s(self, learner: int, step: int) -> float:
        """Virtual time that a learner's step (from 0) takes."""
        run = self._run
        slow = run.slowdown if learner % 2 else 0.0
        return run.step_s * (1 + slow) * (1 + run.jitter * self._chance.share("step", learner, step))

    def outages(self, learner: int) -> Iterator[tuple[float, float]]:
        """(begin, end) in virtual seconds of all the time in which a learner is not there, in order; endless if any.

        Failures are Poisson in the time that it is there (paper, failure simulation).
        """
        run, now = self._run, 0.0
        if learner >= run.learners:  # a scavenger
            if run.scavenge_from_s:
                yield 0.0, run.scavenge_from_s
            yield run.scavenge_until_s, math.inf
            return
        if run.late_join_s is not None and learner == run.learners - 1:
            yield 0.0, run.late_join_s
            now = run.late_join_s
        number = 0
        while run.fail_every_s is not None:
            now += -run.fail_every_s * math.log(1.0 - self._chance.share("failure", learner, number))
            yield now, now + run.fail_down_s
            now += run.fail_down_s
            number += 1
