"""Globals as they lie on the bus: what whoever reads them makes of them, computed once more. Pure.

By the descriptions in `pipeline.transfer.global_formats`, `halves` and `updates`; no code is shared with them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.pipeline.bus.commits import Commit, Rest, Staged
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.payload import Chunk, Update
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.codec import PayloadReader, decode, payload_digest
from diloco_studies.virtual.memory_store import Stream
from tests.world import reference
from tests.world.record import Seen
from tests.world.surviving import Float64, Surviving

Float32 = npt.NDArray[np.float32]


class Followed(NamedTuple):
    """Values bit for bit, and momentum, each (elements,)."""

    theta: Float32
    momentum: Float64


def follow(
    theta: Float32,
    momentum: Float64,
    updates: Sequence[Update],
    read: Callable[[str], bytes],
    sync: SyncSpec,
) -> Followed | str:
    """From a key frame, or from a version; or why that cannot be.

    Args:
        theta, momentum: (elements,) each.
        updates: that lead on from there.
        read: a payload's bytes by its key; as many as there are.
        sync: the run's.
    """
    for update in updates:
        if payload_digest(memoryview(theta.tobytes()), sync.chunk_bytes) != update.base:
            return f"{update.payload} does not lead on from what is before it"
        wire = read(update.payload)
        blocks = -(-len(theta) // 256)
        if len(wire) != blocks * 258:
            return f"{update.payload} has {len(wire)} bytes"
        step = reference.dequantized(wire, len(theta), "int8")
        theta = theta - step.astype(np.float32)
        if update.merged and not update.averaged:
            if len(wire := read(update.merged)) != blocks * 258:
                return f"{update.merged} has {len(wire)} bytes"
            momentum = sync.outer_momentum * momentum + reference.dequantized(wire, len(theta), "int8")
        else:
            momentum = reference.momentum_after(momentum, step, sync, averaged=update.averaged)
    return Followed(theta, momentum)


def badly_coded(wire: bytes, due: Float64, allowed: float) -> str | None:
    """What is wrong with the code of a step; None: it is the nearest one.

    Args:
        wire: of the update.
        due: (elements,) the step as it should be.
        allowed: what float32 may make of an element.
    """
    found = reference.dequantized(wire, len(due), "int8")
    for start in range(0, len(due), 256):
        block, code = due[start : start + 256], found[start : start + 256]
        scale = float(np.abs(block).max()) / 127 * (1 + 2**-7)
        if np.abs(code - block).max() > scale / 2 * (1 + 1e-5) + allowed:
            return f"{code} for {block}"
    return None


class Globals:
    """What a run has published, as an onlooker reads it."""

    def __init__(self, store: Seen, layout: Layout, sync: SyncSpec, broken: Callable[[str, str], None]) -> None:
        """broken: called with a promise and how it was broken."""
        self._store, self._layout, self._broken = store, layout, broken
        self._syncs = [reference.constants(sync, (slot.tensor for slot in f.slots)) for f in layout.fragments]

    def _stream(self, key: str) -> Stream | None:
        found = self._store.values.get(key)
        return found if isinstance(found, Stream) else None

    def of(self, commit: Commit, state: Surviving) -> tuple[Float64, Float64, Float64] | None:
        """The exact values of a commit, as they lie on the bus, those that learners train from, and the momentum.

        state: the fragment before it.
        """
        p = commit.record.fragment
        sync = self._syncs[p]
        of = commit.published
        if of.behind > len(of.updates):
            self._broken("updates lead to the values", f"fragment {p} version {commit.version}: too few of them")
            return None
        digest = commit.digest if not of.behind else of.updates[-of.behind].base
        found = self.whole(of.payload, of.rest, p, digest)
        momentum = self.values(of.momentum.key, p, None) if of.momentum else None
        if found is None:
            return None
        momentum = np.zeros_like(found[0]) if momentum is None else momentum  # as its owner takes it
        if sync.global_codec != "int8" or commit.expected is None:
            return *found, momentum
        behind = of.updates[len(of.updates) - of.behind :]
        whole = follow(found[0].astype(np.float32), momentum, behind, self.bytes_of, sync)
        one = follow(state.theta.astype(np.float32), state.momentum, of.updates[-1:], self.bytes_of, sync)
        for led in (whole, one):
            theta = None if isinstance(led, str) else led.theta
            if theta is None or payload_digest(memoryview(theta.tobytes()), sync.chunk_bytes) != commit.digest:
                self._broken("updates lead to the values", f"fragment {p} version {commit.version}: {led}")
                return None
        assert not isinstance(whole, str)  # it led there
        return whole.theta.astype(np.float64), whole.theta.astype(np.float64), whole.momentum

    def whole(self, payload: Staged, rest: Rest | None, p: int, digest: bytes) -> tuple[Float64, Float64] | None:
        """Exact values as they lie on the bus, of an update its key frame's, and those that learners see."""
        if self._syncs[p].global_codec != "bf16":
            exact = self.values(payload.key, p, digest)
            return None if exact is None else (exact, exact)
        halves = [self._half(one.key if one else "", p) for one in (payload, rest)]
        theta = reference.joined(*halves) if all(halves) else np.empty(0, np.float32)
        if payload_digest(memoryview(theta.tobytes()), self._syncs[p].chunk_bytes) != digest:
            self._broken("a committed payload is whole", f"fragment {p}, {payload.key}: {halves}")
            return None
        shown = np.frombuffer(halves[0], ml_dtypes.bfloat16).astype(np.float64)
        if not np.array_equal(shown, reference.rounded(theta.astype(np.float64))):
            self._broken("learners have the nearest values", f"fragment {p}: {shown} of {theta}")
        if not np.isfinite(theta).all():
            self._broken("arrays are finite", payload.key)
        return theta.astype(np.float64), shown

    def bytes_of(self, key: str) -> bytes:
        """A payload's, as they lie on the bus."""
        stream = self._stream(key)
        return b"".join(decode(Chunk, chunk).data for chunk in stream.data) if stream else b""

    def _half(self, key: str, p: int) -> bytes:
        """Two bytes an element, as they lie on the bus; nothing if they are not whole."""
        data = self.bytes_of(key)
        return data if len(data) == 2 * self._layout.fragments[p].elements else b""

    def values(self, key: str, p: int, digest: bytes | None) -> Float64 | None:
        """A payload as it lies on the bus."""
        stream, sync = self._stream(key), self._syncs[p]
        reader = PayloadReader(self._layout.fragments[p].elements, "fp32", sync.chunk_bytes)
        for chunk in stream.data if stream else ():
            reader.feed(chunk)
        if not reader.complete or (digest is not None and reader.digest != digest):
            self._broken("a committed payload is whole", f"{key}: {reader.received} of {reader.expected} chunks")
            return None
        values: Float64 = reader.array().astype(np.float64)
        if not np.isfinite(values).all():
            self._broken("arrays are finite", key)
        return values
