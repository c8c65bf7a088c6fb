"""Deltas as they travel, from front to back, so that what is encoded can leave while the rest is. Pure: numpy only.

The vectors that they are made of lie where they are encoded: in host memory (`OnHost`), or on the model's device
(`device_encoding`). The exchange only passes them on. What quantizing a delta lost goes with the next ones: error
feedback, whose vectors lie there too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.head import MergedBase
from diloco.pipeline.messages.tape import Contribution
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload import quantize
from diloco.pipeline.payload.codec import DTYPES
from diloco.pipeline.transfer.payloads import Offload

Float32 = npt.NDArray[np.float32]

BLOCK = 128 * 1024
"""Elements encoded at a time."""
AT_ONCE = 2 * BLOCK
"""A delta of so many is encoded in about the time that it takes to wake another thread and to be woken by it."""


def encode_delta(
    base: Float32,
    values: Callable[[], Float32],
    kind: Codec,
    residual: Float32 | None,
    out: npt.NDArray[np.uint8],
    grow_to: Callable[[int], object] = lambda upto: None,
) -> Float32 | None:
    """The pseudogradient, base minus current, as it travels; returns what is lost of it, where that is kept.

    Args:
        base: (elements,) what it is measured from.
        values: gives the current ones (elements,), which are overwritten.
        kind: of codec.
        residual: (elements,) of earlier deltas, to go with it where the codec quantizes; None: zero.
        out: (`payload_bytes`,) written from front to back.
        grow_to: called with how much of `out` is final, after each step.
    """
    current = values()
    if kind == "bf16" or kind == "fp32":
        delta = out.view(DTYPES[kind])
        for start in range(0, len(base), BLOCK):  # so that the difference stays in the cache until it is converted
            piece = slice(start, start + BLOCK)
            np.subtract(base[piece], current[piece], out=current[piece])
            np.copyto(delta[piece], current[piece], casting="same_kind")
            grow_to(delta.itemsize * min(start + BLOCK, len(base)))
        return None
    encoding = quantize.Encoding(len(base), kind, out)
    for start in range(0, len(base), quantize.GROUP):
        delta = current[start : start + quantize.GROUP]
        np.subtract(base[start : start + quantize.GROUP], delta, out=delta)
        if residual is not None:
            np.add(delta, residual[start : start + quantize.GROUP], out=delta)
        grow_to(encoding.add(delta, delta))
    return current


# --- where it is done -------------------------------------------------------------------------------------


def grown(error: Any, now: Any | None, fed: Any | None) -> Any:
    """error + now - fed, in the memory of `error`; None: zero."""
    if now is not None:
        error += now
    if fed is not None:
        error -= fed
    return error


class Encoder(Protocol):
    """Where a learner's bases and residuals are, and what is computed with them there.

    A vector of its own is a flat float32 one (elements,) of whatever type it likes. Any thread may call it.
    """

    at_once: int
    """Vectors of so many elements take less time than another thread takes to be woken for them; 0: none."""

    def keep(self, values: Float32) -> Any:
        """A global as it was pulled, to be a base from now on: a vector of its own."""

    def read(self, kept: Any) -> Float32:
        """The values of a vector that was kept; not to be written to."""

    def encode(
        self,
        base: Any,
        values: Callable[[], Any],
        kind: Codec,
        residual: Any | None,
        out: npt.NDArray[np.uint8],
        grow_to: Callable[[int], object],
    ) -> Any | None:
        """As `encode_delta`, of vectors of its own; the bytes are the same."""

    def grown(self, error: Any, now: Any | None, fed: Any | None) -> Any:
        """As `grown`."""


class OnHost:
    """In host memory, by numpy."""

    def __init__(self, at_once: int = 0) -> None:
        self.at_once = at_once

    encode = staticmethod(encode_delta)
    grown = staticmethod(grown)

    @staticmethod
    def keep(values: Float32) -> Float32:
        """As it is."""
        return values

    read = keep


async def apart(encoder: Encoder, offload: Offload, elements: int, work: Callable[..., Any], *args: Any) -> Any:
    """Work on so many elements: in another thread, unless to wake that takes longer than the work itself."""
    return work(*args) if elements <= encoder.at_once else await offload(work, *args)


# --- error feedback ---------------------------------------------------------------------------------------

MOST_SENT = 2
"""Undecided deltas of one fragment that are remembered, the newest: while one is on its way, the one before it may be
merged. That may be of an earlier base, or the one that it renews."""


@dataclass(frozen=True, slots=True)
class _Sent:
    fed: Any | None
    """r, as it was then; None: zero."""
    error: Any
    """d + r - q."""


class ErrorFeedback:
    """The residuals of all fragments, and the deltas whose fate is not known yet.

    A delta d of a fragment is sent as q, the code of d + r, where r is the fragment's residual. What the residual is:

        residual = sum of (d - q) over this incarnation's deltas of the fragment that were *merged*

    so that the merged q and the residual are together what the merged d are, however many there were: nothing that was
    trained and merged is lost for good, it only comes later. Whence, for each delta that was sent with r:

    - merged: the residual grows by d - q. If it is still r, it becomes d + r - q: just what the encoding lost.
    - refused, outdone by a later attempt on its base, too stale, or never there: the residual stays. What such a delta
      has trained is overwritten, and counted so, and its error with it; r waits for the next delta.
    - not decided yet when the next is sent (a stale delta may join the next window): both carry r. Each that is merged
      adds its own d - q, so where both are, r is taken back once.

    It begins at zero with an incarnation, and when heads went back: the merges that it speaks of may be none of the
    history that survived. What was merged is learnt from the tape, and after a gap from the head's record of merged
    bases; a merge that neither tells of (two commits within one gap), or one told of after two more deltas were sent,
    loses its error, once.

    Memory: a float32 copy of the model, and one of the fragment for each undecided delta, `MOST_SENT` at most. One
    thread calls it; an array that it gave is never written to again.
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

    def undecided(self, fragment: int) -> bool:
        """The fate of a delta is not known yet."""
        return bool(self._sent.get(fragment))

    def inherit(self, fragment: int, residual: Any) -> None:
        """As another process has had it, which served the fragment until now."""
        self._residuals[fragment] = residual

    def reset(self, fragment: int) -> None:
        """The fragment went back, or goes to another process."""
        self._residuals.pop(fragment, None)
        self._sent.pop(fragment, None)
