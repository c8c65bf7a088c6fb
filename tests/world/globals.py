"""Globals as they lie on the bus: what whoever reads them makes of them, computed once more. Pure.

By the descriptions in `pipeline.transfer.globals`; no code is shared with them.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.pipeline.bus.commits import Commit, Remainder, Staged
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.payload import Chunk
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.codec import PayloadReader, decode, payload_digest
from diloco_studies.virtual.memory_store import Stream
from tests.world import reference
from tests.world.record import Seen
from tests.world.surviving import Float64

Float32 = npt.NDArray[np.float32]


class Globals:
    """What a run has published, as an onlooker reads it."""

    def __init__(self, store: Seen, layout: Layout, sync: SyncSpec, broken: Callable[[str, str], None]) -> None:
        """broken: called with a promise and how it was broken."""
        self._store, self._layout, self._broken = store, layout, broken
        self._syncs = [reference.constants(sync, (slot.tensor for slot in f.slots)) for f in layout.fragments]

    def _stream(self, key: str) -> Stream | None:
        found = self._store.values.get(key)
        return found if isinstance(found, Stream) else None

    def of(self, commit: Commit) -> tuple[Float64, Float64, Float64] | None:
        """The exact values of a commit, as they lie on the bus, those that learners train from, and the momentum."""
        p, of = commit.record.fragment, commit.published
        found = self.whole(of.payload, of.rest, p, commit.record.digest)
        momentum = self.values(of.momentum.key, p, None) if of.momentum else None
        if found is None:
            return None
        momentum = np.zeros_like(found[0]) if momentum is None else momentum  # as its owner takes it
        return *found, momentum

    def whole(self, payload: Staged, rest: Remainder | None, p: int, digest: bytes) -> tuple[Float64, Float64] | None:
        """Exact values as they lie on the bus, and those that learners see."""
        if self._syncs[p].global_codec == "fp32":
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
