"""The last poll of a run, from which the syncer's `/metrics` are served without reading the bus again. Pure."""

import math
from dataclasses import dataclass, field
from statistics import median

from diloco.pipeline.messages.fragment import Committed, Rewound
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.pacing import known_steps
from diloco.pipeline.view.goodput import Seconds
from diloco.pipeline.view.page.model import Poll
from diloco.pipeline.view.status import LearnerStatus, is_missed, present

# A learner that was silent for longer is left out: each container brings a new name, and the names would pile up.
SHOWN_S = 600.0
# At most this many are listed, the ones heard from last. Counts include all learners.
MAX_LISTED = 1024


@dataclass(slots=True)
class Reading:
    """The last poll, and values that need more than one poll."""

    poll: Poll | None = None
    """None before the first poll."""
    merged_unix_s: dict[int, float] = field(default_factory=dict)
    """By fragment: when its version was first seen to rise; until then, when the fragment was first seen."""
    rewound_unix_s: float = -math.inf
    """When the bus was last found at an earlier state, according to the tape, by any syncer."""
    cosines: dict[str, float] = field(default_factory=dict)
    """By learner: the cosine of its last merged delta with the others of its window, from the tape; none if it was the
    only one."""
    merges: dict[int, Committed] = field(default_factory=dict)
    """By fragment: its last merge, from the tape."""
    time: dict[str, Seconds] = field(default_factory=dict)
    """The time of each learner since the start, by activity. It never falls, although reports that arrive with other
    delays move the ends of `away` by milliseconds."""
    _versions: dict[int, int] = field(default_factory=dict)

    def see(self, poll: Poll) -> None:
        """Record the next poll."""
        self.poll = poll
        rewound = [one.unix_s for one in poll.records if isinstance(one, Rewound)]
        self.rewound_unix_s = max([self.rewound_unix_s, *rewound])
        merges = [one for one in poll.records if isinstance(one, Committed) and one.contributions]
        self.merges |= {one.fragment: one for one in merges}
        last = self.cosines | {c.learner: c.cosine for one in merges for c in one.contributions}
        there = [one["id"] for one in self.learners()]
        self.cosines = {name: cosine for name in there if (cosine := last.get(name)) is not None}
        self.time = {
            name: {activity: max(s, self.time.get(name, one)[activity]) for activity, s in one.items()}
            for name, one in poll.status["goodput"]["learners"].items()
        }
        running = poll.status["phase"] == Phase.RUNNING
        for one in poll.status["fragments"]:
            p, version = one["id"], one["version"]
            if not running or version > self._versions.get(p, -1):
                self.merged_unix_s[p] = poll.now_s
            self._versions[p] = version

    def learners(self) -> list[LearnerStatus]:
        """Return one entry per learner: those present, and those that fell silent recently."""
        if self.poll is None:
            return []
        there = present(self.poll.status["learners"])
        found = [one for one in there if (one["live"] or is_missed(one)) and one["age_s"] < SHOWN_S]
        return sorted(found, key=lambda one: one["age_s"])[:MAX_LISTED]

    def counted(self) -> dict[str, int]:
        """Return how many learners are live, silent (however long ago), or left."""
        found = {"live": 0, "silent": 0, "left": 0}
        for one in present(self.poll.status["learners"]) if self.poll is not None else ():
            found["live" if one["live"] else "silent" if is_missed(one) else "left"] += 1
        return found

    def behind(self, learner: LearnerStatus) -> int:
        """Return how many versions a learner's base is behind the head, for the fragment where that is most."""
        heads = {} if self.poll is None else {one["id"]: one["version"] for one in self.poll.status["fragments"]}
        return max((heads.get(p, v) - v for p, v in enumerate(learner["versions"]) if v >= 0), default=0)

    def step_s(self) -> float | None:
        """Return the median step time of the live learners; if none is live, of all, whose last reports Redis keeps.

        An alert depends on it, and must not end only because no learner is left.
        """
        learners = present(self.poll.status["learners"]) if self.poll is not None else []
        known = known_steps(one["step_s"] for one in learners if one["live"])
        known = known or known_steps(one["step_s"] for one in learners)
        return median(known) if known else None
