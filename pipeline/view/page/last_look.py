"""The last look at a run, for the syncer's `/metrics`: who asks for them reads no bus. Pure."""

import math
from dataclasses import dataclass, field
from statistics import median

from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.tape import Committed, Rewound
from diloco.pipeline.pacing import known_steps
from diloco.pipeline.view.page.model import Look
from diloco.pipeline.view.status import LearnerStatus, is_missed, present

SHOWN_S = 600.0
"""A learner that is not heard from for longer is gone: names of containers come new with each, and would pile up."""
MOST_LEARNERS = 1024
"""Those heard from last. Numbers of learners are of all."""


@dataclass(slots=True)
class Reading:
    """What was so at the last look, and since when each fragment has had its version."""

    look: Look | None = None
    """None: none was taken yet."""
    merged_unix_s: dict[int, float] = field(default_factory=dict)
    """By fragment: when it was first seen at a higher version; before that, when it was first seen."""
    rewound_unix_s: float = -math.inf
    """When the bus was last found at an earlier state, by the tape: whichever syncer found it, in whichever life."""
    cosines: dict[str, float] = field(default_factory=dict)
    """By learner: of its last merged delta with the others of its window, by the tape; none if it was alone there."""
    _versions: dict[int, int] = field(default_factory=dict)

    def see(self, look: Look) -> None:
        """Take the next look."""
        self.look = look
        rewound = [one.unix_s for one in look.records if isinstance(one, Rewound)]
        self.rewound_unix_s = max([self.rewound_unix_s, *rewound])
        merges = [one for one in look.records if isinstance(one, Committed)]
        last = self.cosines | {c.learner: c.cosine for one in merges for c in one.contributions}
        there = [one["id"] for one in self.learners()]
        self.cosines = {name: cosine for name in there if (cosine := last.get(name)) is not None}
        running = look.status["phase"] == Phase.RUNNING
        for one in look.status["fragments"]:
            p, version = one["id"], one["version"]
            if not running or version > self._versions.get(p, -1):
                self.merged_unix_s[p] = look.now_s
            self._versions[p] = version

    def learners(self) -> list[LearnerStatus]:
        """One entry a learner: those that are there, and those that fell silent not long ago."""
        if self.look is None:
            return []
        there = present(self.look.status["learners"])
        found = [one for one in there if (one["live"] or is_missed(one)) and one["age_s"] < SHOWN_S]
        return sorted(found, key=lambda one: one["age_s"])[:MOST_LEARNERS]

    def counted(self) -> dict[str, int]:
        """How many learners, by what they are: live, silent (also those long gone), left."""
        found = {"live": 0, "silent": 0, "left": 0}
        for one in present(self.look.status["learners"]) if self.look is not None else ():
            found["live" if one["live"] else "silent" if is_missed(one) else "left"] += 1
        return found

    def behind(self, learner: LearnerStatus) -> int:
        """Versions from a learner's base to the head, of the fragment where they are most."""
        heads = {} if self.look is None else {one["id"]: one["version"] for one in self.look.status["fragments"]}
        return max((heads.get(p, v) - v for p, v in enumerate(learner["versions"]) if v >= 0), default=0)

    def step_s(self) -> float | None:
        """Of the usual learner that is live; if none is, of all that were: Redis keeps their last words.

        An alert goes by it, which must not end because nobody is left.
        """
        learners = present(self.look.status["learners"]) if self.look is not None else []
        known = known_steps(one["step_s"] for one in learners if one["live"])
        known = known or known_steps(one["step_s"] for one in learners)
        return median(known) if known else None
