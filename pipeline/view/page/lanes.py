"""Drawing of learners' lanes and fragments' strips, from the tape and from the current status. Pure.

Times in messages come from peers and may be wrong: none is drawn later than now.
"""

from collections.abc import Sequence
from enum import IntFlag

from diloco.pipeline.messages.fragment import Committed, Rejected, Rewound, TapeRecord, WindowChanged
from diloco.pipeline.view.page.timeline import Timeline
from diloco.pipeline.view.status import FragmentStatus, LearnerStatus

# A learner reports three times per second. If none arrives for this long, its lane has a gap.
SILENT_S = 1.0
# A condition that holds at two polls is drawn as continuous if they are at most this far apart.
GLANCE_S = 5.0
# A learner that makes no step for the time of this many steps, and for `STALLED_S`, is drawn as waiting.
STALLED_STEPS = 4
STALLED_S = 5.0


class LearnerBits(IntFlag):
    """Bits of a learner's lane; the same numbers as in `lanes.js`."""

    TRAINING = 1
    PUBLISHING = 2
    """One of its deltas is in a window."""
    ADOPTING = 4
    """A head exists that it has not adopted yet."""
    WAITING = 8
    """It reports, but makes no step."""
    GONE = 16
    """It is silent and has not left."""
    MERGED = 32
    REFUSED = 64
    BEGAN = 128
    """The first step of an incarnation."""


class FragmentBits(IntFlag):
    """Bits of a fragment's strip; the same numbers as in `lanes.js`."""

    COLLECTING = 1
    GRACE = 2
    UPLOADING = 4
    MERGING = 8
    MERGED = 16
    REFUSED = 32
    REOPENED = 64
    REWOUND = 128


STATES = {
    "collecting": FragmentBits.COLLECTING,
    "grace": FragmentBits.GRACE,
    "uploading": FragmentBits.UPLOADING,
    "merging": FragmentBits.MERGING,
}


def learner_lane(learner: str) -> str:
    """Return the name of a learner's lane."""
    return f"L/{learner}"


def fragment_lane(fragment: int) -> str:
    """Return the name of a fragment's strip."""
    return f"F/{fragment}"


def _mark(times: Sequence[Timeline], lane: str, begin_s: float, end_s: float, bits: int, clear: int = 0) -> None:
    for one in times:
        one.mark(lane, begin_s, end_s, bits, clear)


def draw_record(times: Sequence[Timeline], record: TapeRecord, shown: "Shown", now_s: float) -> None:
    """Draw a record of the tape in lanes and strips."""
    at, strip = min(record.unix_s, now_s), fragment_lane(record.fragment)
    fragment = shown.fragment(record.fragment)

    if isinstance(record, Committed) and record.contributions:
        merging = at - record.merge_s
        uploading = merging - record.upload_s
        grace = uploading - record.grace_s
        opened = grace - record.quorum_s
        if fragment:
            spans = ((opened, grace, FragmentBits.COLLECTING), (grace, uploading, FragmentBits.GRACE))
            for begin_s, end_s, bits in (
                *spans,
                (uploading, merging, FragmentBits.UPLOADING),
                (merging, at, FragmentBits.MERGING),
            ):
                if end_s > begin_s:
                    _mark(times, strip, begin_s, end_s, bits)
            _mark(times, strip, at, at, FragmentBits.MERGED)
        for part in record.contributions:
            if shown.learner(part.learner):
                lane = learner_lane(part.learner)
                _mark(times, lane, grace, at, LearnerBits.PUBLISHING)
                _mark(times, lane, at, at, LearnerBits.MERGED)
    elif isinstance(record, Rejected):
        if fragment:
            _mark(times, strip, at, at, FragmentBits.REFUSED)
        if shown.has_learner(record.learner):
            _mark(times, learner_lane(record.learner), at, at, LearnerBits.REFUSED)
    elif isinstance(record, Rewound) and fragment:
        _mark(times, strip, at, at, FragmentBits.REWOUND)
    elif isinstance(record, WindowChanged) and record.attempt and fragment:
        _mark(times, strip, at, at, FragmentBits.REOPENED)


class Shown:
    """The learners and fragments that have a lane: the first ones, up to a bound."""

    def __init__(self, max_lanes: int) -> None:
        self._max_lanes = max_lanes
        self._learners: dict[str, None] = {}

    def learner(self, name: str) -> bool:
        """Return whether a learner has a lane, and give it one if there are fewer than `max_lanes`."""
        if name not in self._learners and len(self._learners) < self._max_lanes:
            self._learners[name] = None
        return name in self._learners

    def has_learner(self, name: str) -> bool:
        """Return whether a learner has a lane, without giving it one: a refused header may have any name in it."""
        return name in self._learners

    def fragment(self, number: int) -> bool:
        """Return whether a fragment has a strip."""
        return number < self._max_lanes


class LearnerLife:
    """The last known state of one learner, from which its current activity is derived."""

    def __init__(self) -> None:
        self._incarnation = ""
        self._heard_s = self._stepped_s = 0.0
        self._step = 0
        self._left = False
        self._more = LearnerBits(0)
        self.gaps: list[float] = []
        """When incarnations that ended without leaving were last heard; whoever reads it clears it."""

    def draw(
        self, times: Sequence[Timeline], learner: LearnerStatus, publishing: bool, behind: int, now_s: float, over: bool
    ) -> LearnerBits:
        """Continue its lane, and return what it does now.

        behind: number of fragments whose head it has not adopted. over: the run is finished, so silence is not a gap.
        """
        lane, heard_s, before_s = learner_lane(learner["id"]), now_s - learner["age_s"], self._heard_s
        if learner["incarnation"] != self._incarnation:
            self.begin(times, learner, now_s)
            before_s = heard_s
        self._left = learner["left"]
        if self._left:
            return LearnerBits(0)
        if learner["age_s"] > SILENT_S:
            if not over:
                _mark(times, lane, heard_s + SILENT_S, now_s, LearnerBits.GONE)
            return LearnerBits.GONE
        made = learner["step"] - self._step
        if made:
            if not self._step:
                _mark(times, lane, heard_s, heard_s, LearnerBits.BEGAN)
            self._step, self._stepped_s = learner["step"], heard_s
        stalled = not self._step or heard_s - self._stepped_s > max(STALLED_S, STALLED_STEPS * learner["step_s"])
        does = LearnerBits.WAITING if stalled else LearnerBits.TRAINING
        silent_s = heard_s - before_s
        if silent_s < 2 * SILENT_S or made * learner["step_s"] > silent_s / 2:  # it was active in between
            _mark(times, lane, before_s, heard_s, does, clear=LearnerBits.GONE)
        else:
            _mark(times, lane, heard_s, heard_s, does)
        more = (LearnerBits.PUBLISHING if publishing else LearnerBits(0)) | (
            LearnerBits.ADOPTING if behind and self._step else LearnerBits(0)
        )
        if more:
            _mark(times, lane, heard_s, now_s, more)
        if (still := more & self._more) and silent_s < GLANCE_S:
            _mark(times, lane, before_s, heard_s, still)
        self._heard_s, self._more = heard_s, more
        return does | more

    def begin(self, times: Sequence[Timeline], learner: LearnerStatus, now_s: float) -> None:
        """Draw a new incarnation from its first step to its last report, and the gap before it.

        There is no gap if the previous incarnation left in order.
        """
        lane, heard_s = learner_lane(learner["id"]), now_s - learner["age_s"]
        began_s = heard_s - learner.get("wall_s", 0.0)
        if self._incarnation and not self._left and began_s > self._heard_s + SILENT_S:
            _mark(times, lane, self._heard_s + SILENT_S, began_s, LearnerBits.GONE)
            self.gaps.append(self._heard_s)
        if learner["step"]:
            _mark(times, lane, began_s, heard_s, LearnerBits.TRAINING)
            _mark(times, lane, began_s, began_s, LearnerBits.BEGAN)
        self._incarnation, self._left = learner["incarnation"], learner["left"]
        self._step, self._heard_s, self._stepped_s = learner["step"], heard_s, heard_s


class WindowLife:
    """The last known state of one fragment's window."""

    def __init__(self) -> None:
        self._bits, self._seen_s = FragmentBits(0), 0.0
        self.opened = -1, 0.0
        """From the tape: the version whose window was opened last, and when."""

    def draw(self, times: Sequence[Timeline], fragment: FragmentStatus, now_s: float) -> None:
        """Continue its strip. A state that is unchanged since the last poll is drawn as continuous."""
        bits = STATES.get(fragment["window"]["state"], FragmentBits(0))
        if bits:
            since_s = self._seen_s if bits == self._bits and now_s - self._seen_s < GLANCE_S else now_s
            if not self._seen_s and bits == FragmentBits.COLLECTING and self.opened[0] == fragment["version"]:
                since_s = self.opened[1]
            _mark(times, fragment_lane(fragment["id"]), since_s, now_s, bits)
        self._bits, self._seen_s = bits, now_s
