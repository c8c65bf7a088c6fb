"""The merged share: how much of what the learners train comes into the global. Pure.

    since the start   merged / trained tokens of the whole run, earlier parts of a resumed one included
    recent            the same of what both grew by in the last five minutes (`RECENT_S`)
    pending           pending / trained tokens: what may still be merged (`status`)

Tokens are those of the whole model: a fragment counts by its share of it. What was trained a moment ago is pending, so
in a run's first minutes merged / trained is low however well all goes: there `pending` says how much may still come.
The recent share has as much pending at its end as at its beginning, and is right without it. It is at most 1, also
where what was trained before is merged now.

The lead notes (Unix time, trained, merged) in the run's state every `SAMPLE_S`. So whoever reads the state and the
heads knows the recent share, whichever syncer leads, and also when none does any more.
"""

from collections.abc import Sequence
from typing import TypedDict

from diloco.pipeline.messages.wire import MOST_SAMPLES

SAMPLE_S = 15.0
RECENT_S = 300.0
LEAST_S = 30.0
"""Nothing is said of a shorter time: merges come in lumps."""
NEARLY_NONE = 0.1
"""Of the tokens: if no more than this share was trained before, the last minutes are the whole run."""

Sample = tuple[float, int, int]
"""(Unix time, trained tokens, merged tokens) of the whole run."""


def _sound(samples: Sequence[Sample], now: Sample) -> list[Sample]:
    """Those before now: a bus that came back at an earlier state, or another machine's clock, leaves others."""
    return [one for one in samples if all(was <= at for was, at in zip(one, now, strict=True))]


def sample_due(samples: Sequence[Sample], unix_s: float) -> bool:
    """Whether the lead should note another sample."""
    return not samples or not 0 <= unix_s - samples[-1][0] < SAMPLE_S


def with_sample(samples: Sequence[Sample], now: Sample) -> tuple[Sample, ...]:
    """The samples with one more: those of the last `RECENT_S`, and the one before."""
    kept = [*_sound(samples, now), now]
    while len(kept) > 1 and (now[0] - kept[1][0] >= RECENT_S or len(kept) > MOST_SAMPLES):
        del kept[0]
    return tuple(kept)


def recent_share(samples: Sequence[Sample], now: Sample) -> tuple[float | None, float]:
    """(Merged over trained since about `RECENT_S` ago, over how many seconds that is).

    In a younger run it is since the first sample. None: nothing was trained, or the time is too short to tell.
    """
    before = _before(samples, now)
    span_s, trained, merged = (at - was for was, at in zip(before, now, strict=True))
    return min(1.0, merged / trained) if trained and span_s >= LEAST_S else None, span_s


def _before(samples: Sequence[Sample], now: Sample) -> Sample:
    """The sample that the recent share counts from."""
    sound = _sound(samples, now)
    return next((one for one in reversed(sound) if now[0] - one[0] >= RECENT_S), sound[0] if sound else now)


class MergedShare(TypedDict):
    """Shares of the trained tokens, JSON-able; None: nothing is known yet."""

    since_start: float | None
    pending: float | None
    recent: float | None
    recent_s: float
    """Seconds that the recent one is about."""
    recent_is_all: bool
    """They are all of the run, or nearly: it says what `since_start` says already."""


def shares(samples: Sequence[Sample], now: Sample, pending: int = 0) -> MergedShare:
    """All three.

    samples: noted by the lead, oldest first. now: time and totals.
    """
    _, trained, merged = now
    recent, recent_s = recent_share(samples, now)
    return {
        "since_start": min(1.0, merged / trained) if trained else None,
        "pending": pending / trained if trained else None,
        "recent": recent,
        "recent_s": recent_s,
        "recent_is_all": _before(samples, now)[1] <= NEARLY_NONE * trained,
    }
