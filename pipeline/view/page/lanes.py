"""What is drawn in a learner's lane and in a fragment's strip, from the tape and from what is so now. Pure.

Every time that comes from a message is a peer's word: none is drawn later than now.
"""

from collections.abc import Sequence
from enum import IntFlag

from diloco.pipeline.messages.tape import Committed, Rejected, Rewound, TapeRecord, WindowChanged
from diloco.pipeline.view.page.timeline import Timeline
from diloco.pipeline.view.status import FragmentStatus, LearnerStatus

SILENT_S = 1.0
"""A learner reports three times a second: not heard from for longer, its lane has a gap."""
GLANCE_S = 5.0
"""What is so at two looks no further apart was so in between."""
STALLED_STEPS = 4
"""A learner that makes no step in the time of so many, and in `STALLED_S`, waits for something."""
STALLED_S = 5.0


class Of(IntFlag):
    """A learner's lane; `lanes.js` has the same numbers."""

    TRAINING = 1
    PUBLISHING = 2
    """A delta of it is in a window."""
    ADOPTING = 4
    """There is a head that it has not adopted yet."""
    WAITING = 8
    """It reports, and makes no step."""
    GONE = 16
    """Not heard from, and it has not left."""
    MERGED = 32
    REFUSED = 64
    BEGAN = 128
    """The first step of an incarnation."""


class In(IntFlag):
    """A fragment's strip; `lanes.js` has the same numbers."""

    COLLECTING = 1
    GRACE = 2
    UPLOADING = 4
    MERGING = 8
    MERGED = 16
    REFUSED = 32
    REOPENED = 64
    REWOUND = 128


STATES = {"collecting": In.COLLECTING, "grace": In.GRACE, "uploading": In.UPLOADING, "merging": In.MERGING}


def learner_lane(learner: str) -> str:
    """Name of a learner's lane."""
    return f"L/{learner}"


def fragment_lane(fragment: int) -> str:
    """Name of a fragment's strip."""
    return f"F/{fragment}"


def _mark(times: Sequence[Timeline], lane: str, begin_s: float, end_s: float, bits: int, clear: int = 0) -> None:
    for one in times:
        one.mark(lane, begin_s, end_s, bits, clear)


def draw_record(times: Sequence[Timeline], record: TapeRecord, shown: "Shown", now_s: float) -> None:
    """What a record of the tape tells of lanes and strips."""
    at, strip = min(record.unix_s, now_s), fragment_lane(record.fragment)
    fragment = shown.fragment(record.fragment)

    if isinstance(record, Committed) and record.contributions:
        merging = at - record.merge_s
        uploading = merging - record.upload_s
        grace = uploading - record.grace_s
        opened = grace - record.quorum_s
        if fragment:
            spans = ((opened, grace, In.COLLECTING), (grace, uploading, In.GRACE))
            for begin_s, end_s, bits in (*spans, (uploading, merging, In.UPLOADING), (merging, at, In.MERGING)):
                if end_s > begin_s:
                    _mark(times, strip, begin_s, end_s, bits)
            _mark(times, strip, at, at, In.MERGED)
        for part in record.contributions:
            if shown.learner(part.learner):
                lane = learner_lane(part.learner)
                _mark(times, lane, grace, at, Of.PUBLISHING)
                _mark(times, lane, at, at, Of.MERGED)
    elif isinstance(record, Rejected):
        if fragment:
            _mark(times, strip, at, at, In.REFUSED)
        if shown.has_learner(record.learner):
            _mark(times, learner_lane(record.learner), at, at, Of.REFUSED)
    elif isinstance(record, Rewound) and fragment:
        _mark(times, strip, at, at, In.REWOUND)
    elif isinstance(record, WindowChanged) and record.attempt and fragment:
        _mark(times, strip, at, at, In.REOPENED)


class Shown:
    """Which learners and fragments have a lane: those that came first, up to a bound."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._learners: dict[str, None] = {}

    def learner(self, name: str) -> bool:
        """Whether it is shown; it is from now on, if there is room."""
        if name not in self._learners and len(self._learners) < self._most:
            self._learners[name] = None
        return name in self._learners

    def has_learner(self, name: str) -> bool:
        """The same, of a name that may be anybody's: a refused header's is not checked."""
        return name in self._learners

    def fragment(self, number: int) -> bool:
        """Whether it is shown."""
        return number < self._most


class LearnerLife:
    """One learner as it was last heard, to tell what it does now."""

    def __init__(self) -> None:
        self._incarnation = ""
        self._heard_s = self._stepped_s = 0.0
        self._step = 0
        self._left = False
        self._more = Of(0)

    def draw(
        self, times: Sequence[Timeline], learner: LearnerStatus, publishing: bool, behind: int, now_s: float, over: bool
    ) -> Of:
        """Go on with its lane; what it does now.

        behind: fragments whose head it has not adopted. over: the run is finished: nobody is missed.
        """
        lane, heard_s, before_s = learner_lane(learner["id"]), now_s - learner["age_s"], self._heard_s
        if learner["incarnation"] != self._incarnation:
            self.begin(times, learner, now_s)
            before_s = heard_s
        self._left = learner["left"]
        if self._left:
            return Of(0)
        if learner["age_s"] > SILENT_S:
            if not over:
                _mark(times, lane, heard_s + SILENT_S, now_s, Of.GONE)
            return Of.GONE
        made = learner["step"] - self._step
        if made:
            if not self._step:
                _mark(times, lane, heard_s, heard_s, Of.BEGAN)
            self._step, self._stepped_s = learner["step"], heard_s
        stalled = not self._step or heard_s - self._stepped_s > max(STALLED_S, STALLED_STEPS * learner["step_s"])
        does = Of.WAITING if stalled else Of.TRAINING
        silent_s = heard_s - before_s
        if silent_s < 2 * SILENT_S or made * learner["step_s"] > silent_s / 2:  # it went on while nothing was heard
            _mark(times, lane, before_s, heard_s, does, clear=Of.GONE)
        else:
            _mark(times, lane, heard_s, heard_s, does)
        more = (Of.PUBLISHING if publishing else Of(0)) | (Of.ADOPTING if behind and self._step else Of(0))
        if more:
            _mark(times, lane, heard_s, now_s, more)
        if (still := more & self._more) and silent_s < GLANCE_S:
            _mark(times, lane, before_s, heard_s, still)
        self._heard_s, self._more = heard_s, more
        return does | more

    def begin(self, times: Sequence[Timeline], learner: LearnerStatus, now_s: float) -> None:
        """Draw an incarnation that was not known, from its first step to its last word; and that none was there before,
        unless the one before has left in order."""
        lane, heard_s = learner_lane(learner["id"]), now_s - learner["age_s"]
        began_s = heard_s - learner.get("wall_s", 0.0)
        if self._incarnation and not self._left and began_s > self._heard_s + SILENT_S:
            _mark(times, lane, self._heard_s + SILENT_S, began_s, Of.GONE)
        if learner["step"]:
            _mark(times, lane, began_s, heard_s, Of.TRAINING)
            _mark(times, lane, began_s, began_s, Of.BEGAN)
        self._incarnation, self._left = learner["incarnation"], learner["left"]
        self._step, self._heard_s, self._stepped_s = learner["step"], heard_s, heard_s


class WindowLife:
    """One fragment's window as it was last seen."""

    def __init__(self) -> None:
        self._bits, self._seen_s = In(0), 0.0
        self.opened = -1, 0.0
        """By the tape: of which version a window was opened last, and when."""

    def draw(self, times: Sequence[Timeline], fragment: FragmentStatus, now_s: float) -> None:
        """Go on with its strip: what is as it was a moment ago was so all the while."""
        bits = STATES.get(fragment["window"]["state"], In(0))
        if bits:
            since_s = self._seen_s if bits == self._bits and now_s - self._seen_s < GLANCE_S else now_s
            if not self._seen_s and bits == In.COLLECTING and self.opened[0] == fragment["version"]:
                since_s = self.opened[1]
            _mark(times, fragment_lane(fragment["id"]), since_s, now_s, bits)
        self._bits, self._seen_s = bits, now_s
