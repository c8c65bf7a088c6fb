"""The merged share: how much of what the learners train gets into the global. Pure (docs/explanation/ledger.md).

    since the start   merged / trained tokens of the whole run, including earlier parts of a resumed one
    recent            merged / settled tokens of the last five minutes (`RECENT_S`), from samples that the lead writes
    pending           pending / trained tokens: what may still be merged (`status`)

Tokens are tokens of the whole model. Those that are merged or lost are settled, the others pending. Early in a run
merged / trained is low even if all goes well, because what was trained a moment ago is pending. The recent share leaves
pending tokens out: after an outage, merges of what was trained in it would otherwise hide what is lost.
"""

from collections.abc import Sequence
from typing import TypedDict

from diloco.pipeline.messages.wire import MAX_SAMPLES

SAMPLE_S = 15.0
RECENT_S = 300.0
# No recent share is given for a shorter time, because merges come in lumps.
MIN_S = 30.0
# If at most this share of the tokens was settled before the recent period, the period counts as the whole run.
NEARLY_NONE = 0.1

# (Unix time, settled tokens, merged tokens) of the whole run.
Sample = tuple[float, int, int]


def _sound(samples: Sequence[Sample], now: Sample) -> list[Sample]:
    """Return the samples that are not after `now` in any component.

    Others were left by a bus that came back at an earlier state, or by another machine's clock.
    """
    return [one for one in samples if all(was <= at for was, at in zip(one, now, strict=True))]


def sample_due(samples: Sequence[Sample], unix_s: float) -> bool:
    """Return whether the lead should write another sample."""
    return not samples or not 0 <= unix_s - samples[-1][0] < SAMPLE_S


def with_sample(samples: Sequence[Sample], now: Sample) -> tuple[Sample, ...]:
    """Return the samples with one more: those of the last `RECENT_S`, and the one before them."""
    kept = [*_sound(samples, now), now]
    while len(kept) > 1 and (now[0] - kept[1][0] >= RECENT_S or len(kept) > MAX_SAMPLES):
        del kept[0]
    return tuple(kept)


def recent_share(samples: Sequence[Sample], now: Sample) -> tuple[float | None, float]:
    """Return (growth of merged / growth of settled over about `RECENT_S`, the actual period in seconds).

    In a younger run the period begins at the first sample. The share is None if nothing was settled, or the period is
    too short.
    """
    before = _before(samples, now)
    span_s, settled, merged = (at - was for was, at in zip(before, now, strict=True))
    return min(1.0, merged / settled) if settled and span_s >= MIN_S else None, span_s


def _before(samples: Sequence[Sample], now: Sample) -> Sample:
    """Return the sample at which the recent period begins."""
    sound = _sound(samples, now)
    return next((one for one in reversed(sound) if now[0] - one[0] >= RECENT_S), sound[0] if sound else now)


class MergedShare(TypedDict):
    """Shares of the trained tokens, JSON-able; None if nothing is known yet."""

    since_start: float | None
    pending: float | None
    recent: float | None
    recent_s: float
    """Length of the recent period in seconds."""
    recent_is_all: bool
    """The recent period is the whole run, or nearly, so `recent` says the same as `since_start`."""


def shares(samples: Sequence[Sample], unix_s: float, trained: int, merged: int, pending: int = 0) -> MergedShare:
    """Return all three shares.

    samples: written by the lead, oldest first. The others: the current time and totals.
    """
    now = unix_s, trained - pending, merged
    recent, recent_s = recent_share(samples, now)
    return {
        "since_start": min(1.0, merged / trained) if trained else None,
        "pending": pending / trained if trained else None,
        "recent": recent,
        "recent_s": recent_s,
        "recent_is_all": _before(samples, now)[1] <= NEARLY_NONE * now[1],
    }
