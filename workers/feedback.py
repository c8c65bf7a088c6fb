"""Error feedback of one learner: what quantizing its deltas lost goes with its next ones. Pure.

Its vectors are float32 (elements,), of numpy or of whatever else adds up in place: they are where deltas are encoded.

A delta d of a fragment is sent as q, the code of d + r, where r is the fragment's residual. What the residual is:

    residual = sum of (d - q) over this incarnation's deltas of the fragment that were *merged*

so that the merged q and the residual are together what the merged d are, however many there were: nothing that was
trained and merged is lost for good, it only comes later. Whence, for each delta that was sent with r:

- merged: the residual grows by d - q. If it is still r, it becomes d + r - q: just what the encoding lost.
- refused, outdone by a later attempt on its base, too stale, or never there: the residual stays. What such a delta has
  trained is overwritten, and counted so, and its error with it; r waits for the next delta.
- not decided yet when the next is sent (a stale delta may join the next window): both carry r. Each that is merged adds
  its own d - q, so where both are, r is taken back once.

It begins at zero with an incarnation, and when heads went back: the merges that it speaks of may be none of the history
that survived. What was merged is learnt from the tape, and after a gap from the head's record of merged bases; a merge
that neither tells of (two commits within one gap) loses its error, once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from diloco.pipeline.messages.head import MergedBase
from diloco.pipeline.messages.tape import Contribution

MOST_SENT = 4
"""Undecided deltas of one fragment that are remembered: two bases, and an attempt more on each."""


@dataclass(frozen=True, slots=True)
class _Sent:
    fed: Any | None
    """r, as it was then; None: zero."""
    error: Any
    """d + r - q."""


def grown(error: Any, now: Any | None, fed: Any | None) -> Any:
    """error + now - fed, in the memory of `error`; None: zero."""
    if now is not None:
        error += now
    if fed is not None:
        error -= fed
    return error


class ErrorFeedback:
    """The residuals of all fragments, and the deltas whose fate is not known yet.

    Memory: a float32 copy of the model, and one of the fragment for each undecided delta. One thread calls it; an array
    that it gave is never written to again.
    """

    def __init__(self, learner: str, incarnation: str, add: Callable[[Any, Any, Any], Any] = grown) -> None:
        """add: `grown`, where these vectors are."""
        self._me, self._add = (learner, incarnation), add
        self._residuals: dict[int, Any] = {}
        self._sent: dict[int, dict[tuple[int, int], _Sent]] = defaultdict(dict)
        """Fragment -> (base version, tokens) -> delta; of several on one base each has more tokens."""

    def residual(self, fragment: int) -> Any | None:
        """(elements,) to be added to the fragment's next delta; None: zero."""
        return self._residuals.get(fragment)

    def sent(self, fragment: int, at: tuple[int, int], fed: Any | None, error: Any) -> None:
        """A delta is on its way.

        Args:
            fragment: of which.
            at: its base version and its tokens.
            fed: the residual it carries.
            error: (elements,) what its encoding lost; given away.
        """
        sent = self._sent[fragment]
        sent[at] = _Sent(fed, error)
        if len(sent) > MOST_SENT:
            del sent[next(iter(sent))]

    def merged(self, fragment: int, parts: Iterable[Contribution | MergedBase]) -> None:
        """These deltas were merged; others' and those already known are passed over."""
        for part in parts:
            if (part.learner, part.incarnation) != self._me:
                continue
            delta = self._sent[fragment].pop((part.base_version, part.tokens), None)
            if delta is None:
                continue
            now, error = self._residuals.get(fragment), delta.error
            if now is not delta.fed:  # another one was merged since it was sent: rare
                error = self._add(error, now, delta.fed)
            self._residuals[fragment] = error

    def passed(self, fragment: int, version: int) -> None:
        """The fragment is at `version`, and all merges until then were told: older deltas are too stale for another."""
        sent = self._sent[fragment]
        for at in [at for at in sent if at[0] < version - 1]:
            del sent[at]

    def reset(self, fragment: int) -> None:
        """The fragment went back."""
        self._residuals.pop(fragment, None)
        self._sent.pop(fragment, None)
