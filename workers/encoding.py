"""Encode deltas from front to back, so that the first bytes can leave while the rest is encoded. Pure: numpy only.

The vectors that deltas are made of live where they are encoded: in host memory (`OnHost`), or on the model's device
(`device_encoding`). The exchange only passes them on. What quantizing a delta loses is added to later ones: this is
error feedback, whose vectors live there too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.fragment import Contribution, MergedBase
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload import quantize
from diloco.pipeline.payload.codec import DTYPES, TRAITS
from diloco.pipeline.transfer.payloads import Offload

Float32 = npt.NDArray[np.float32]
# A copy of a fragment: returns the vector (elements,), of the encoder's kind. The caller may overwrite the vector. The
# call may wait for a device, so never make it in the training thread.
Snapshot = Callable[[], Any]

# Elements encoded at a time.
BLOCK = 128 * 1024
# A delta of this many elements is encoded in about the time that it takes to wake another thread and be woken by it.
AT_ONCE = 2 * BLOCK


def encode_delta(
    base: Float32,
    values: Callable[[], Float32],
    kind: Codec,
    residual: Float32 | None,
    out: npt.NDArray[np.uint8],
    grow_to: Callable[[int], object] = lambda upto: None,
) -> Float32 | None:
    """Encode the pseudogradient, base minus current; return the encoding error, or None if the codec keeps none.

    Args:
        base: (elements,) what the delta is measured from.
        values: returns the current values (elements,), which are overwritten.
        kind: of codec.
        residual: (elements,) of earlier deltas, for a codec with error feedback; None: zero.
        out: (`payload_bytes`,) written from front to back. With a codec of `DTYPES` it may begin where the values do:
            an element's bytes are written after its value was read for the last time.
        grow_to: called after each step with the number of bytes of `out` that are final.
    """
    current = values()
    match kind:
        case "bf16" | "fp32":
            wire = out.view(DTYPES[kind])
            # In blocks, so that the difference is still in the cache when converted
            for start in range(0, len(base), BLOCK):
                piece = slice(start, start + BLOCK)
                np.subtract(base[piece], current[piece], out=current[piece])
                np.copyto(wire[piece], current[piece], casting="same_kind")
                grow_to(wire.itemsize * min(start + BLOCK, len(base)))
        case "int8" | "int4":
            encoding = quantize.Encoding(len(base), kind, out)
            for start in range(0, len(base), quantize.GROUP):
                delta = current[start : start + quantize.GROUP]
                np.subtract(base[start : start + quantize.GROUP], delta, out=delta)
                if residual is not None:
                    np.add(delta, residual[start : start + quantize.GROUP], out=delta)
                grow_to(encoding.add(delta, delta))
        case _:
            assert_never(kind)
    return current if TRAITS[kind].feedback else None


# --- where it is done -------------------------------------------------------------------------------------


def grown(error: Any, now: Any | None, fed: Any | None) -> Any:
    """Return error + now - fed, in the memory of `error`; None stands for zero."""
    if now is not None:
        error += now
    if fed is not None:
        error -= fed
    return error


class Encoder(Protocol):
    """The place where a learner's bases and residuals live, and the computations on them there.

    Its own vectors are flat float32 ones (elements,) of whatever type it likes. Any thread may call it.
    """

    at_once: int
    """Work on up to this many elements takes less time than waking another thread for it; 0: there is no such size."""

    def keep(self, values: Float32) -> Any:
        """Return a pulled global as a vector of its own, to serve as a base."""

    def read(self, kept: Any) -> Float32:
        """Return the values of a vector from `keep`; the caller must not write to them."""

    def encode(
        self,
        base: Any,
        values: Callable[[], Any],
        kind: Codec,
        residual: Any | None,
        out: npt.NDArray[np.uint8],
        grow_to: Callable[[int], object],
    ) -> Any | None:
        """Do what `encode_delta` does, with vectors of its own; the bytes are the same."""

    def grown(self, error: Any, now: Any | None, fed: Any | None) -> Any:
        """Do what the function `grown` does, with vectors of its own."""


class OnHost:
    """An `Encoder` in host memory, by numpy."""

    def __init__(self, at_once: int = 0) -> None:
        self.at_once = at_once

    encode = staticmethod(encode_delta)
    grown = staticmethod(grown)

    @staticmethod
    def keep(values: Float32) -> Float32:
        """Return the same array: vectors in host memory need no conversion."""
        return values

    read = keep


async def offload_if_large(
    encoder: Encoder, offload: Offload, elements: int, work: Callable[..., Any], *args: Any
) -> Any:
    """Run `work` in another thread, unless it has so few elements that waking the thread takes longer."""
    return work(*args) if elements <= encoder.at_once else await offload(work, *args)


# --- error feedback ---------------------------------------------------------------------------------------

# The newest undecided deltas that are remembered for a fragment. While one is in flight, the previous one may still be
# merged: one of an earlier base, or the one that it renews.
MAX_SENT = 2


@dataclass(frozen=True, slots=True)
class _Sent:
    fed: Any | None
    """The residual r that was added; None: zero."""
    error: Any
    """d + r - q."""


class ErrorFeedback:
    """The residuals of all fragments, and the deltas whose fate is not known yet.

    A delta d is sent as q, the code of d + r, where the residual r is the sum of d - q over this incarnation's deltas
    of the fragment that were *merged*. docs/explanation/formats.md ("Deltas in few bits") says what follows for deltas
    that are refused or undecided. Merges are learnt from the tape, and after a gap from the head's record of merged
    bases.

    Only one thread calls it. It never writes again to an array that it returned.
    """

    def __init__(self, learner: str, incarnation: str, add: Callable[[Any, Any, Any], Any] = grown) -> None:
        """add: the `Encoder.grown` of the place where these vectors live."""
        self._me, self._add = (learner, incarnation), add
        self._residuals: dict[int, Any] = {}
        # Fragment -> (base version, tokens) -> delta. The key is unique: each later delta on a base has more tokens.
        self._sent: dict[int, dict[tuple[int, int], _Sent]] = defaultdict(dict)

    def residual(self, fragment: int) -> Any | None:
        """Return (elements,) to be added to the fragment's next delta; None: zero."""
        return self._residuals.get(fragment)

    def sent(self, fragment: int, at: tuple[int, int], fed: Any | None, error: Any) -> None:
        """Note that a delta is being sent.

        Args:
            fragment: the delta's fragment.
            at: its base version and its tokens.
            fed: the residual that it carries.
            error: (elements,) its encoding error; owned by this object from now on.
        """
        sent = self._sent[fragment]
        sent[at] = _Sent(fed, error)
        if len(sent) > MAX_SENT:
            del sent[next(iter(sent))]

    def merged(self, fragment: int, parts: Iterable[Contribution | MergedBase]) -> None:
        """Update residuals for deltas that were merged; ignore other learners' and those already known."""
        for part in parts:
            if (part.learner, part.incarnation) != self._me:
                continue
            delta = self._sent[fragment].pop((part.base_version, part.tokens), None)
            if delta is None:
                continue
            now, error = self._residuals.get(fragment), delta.error
            if now is not delta.fed:  # rare: another delta was merged after this one was sent
                error = self._add(error, now, delta.fed)
            self._residuals[fragment] = error

    def passed(self, fragment: int, version: int) -> None:
        """Forget deltas that are too stale to be merged, now that all merges up to `version` were reported."""
        sent = self._sent[fragment]
        for at in [at for at in sent if at[0] < version - 1]:
            del sent[at]

    def reset(self, fragment: int) -> None:
        """Forget a fragment that went back to an earlier version."""
        self._residuals.pop(fragment, None)
        self._sent.pop(fragment, None)
