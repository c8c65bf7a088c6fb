"""Large arrays whose memory is used again as soon as nobody refers to them.

Fresh memory costs as much as the work done in it: the kernel clears each page when it is first touched. A fragment goes
through arrays of a few sizes over and over, so what one round leaves is what the next one takes. Nobody gives anything
back: an array's memory is free once the array, and all that views it, are gone. No more is held than a quarter above
what was ever in use at once: before new memory is made, free memory is let go of, oldest first. And what was in
nobody's use for a minute goes back to the kernel, a piece with each array that is asked for: a syncer that serves all
fragments for a while, since another one died, needs more at once than it ever does after.

Fragments differ a little in size, so each array is made with address space for one that is a quarter larger: only what
was touched is memory.
"""

import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

LEAST_BYTES = 2**20
"""Smaller arrays are left to the allocator."""
ROOM = 1.25
"""Free memory is taken for what is larger or smaller by this factor; and as much is held over the most in use."""
IDLE_S = 60.0
"""Longer than rounds take whose cost counts: clearing a page a minute costs nothing."""


class _Piece(NamedTuple):
    """Memory of the allocator's, of which the first `touched` bytes are more than addresses."""

    raw: Bytes
    touched: int
    since_s: float
    """When it came into use, or into nobody's."""


class Buffers:
    """A pool, of any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """now: a clock, s, which finalizers may ask."""
        self._now = now
        self._free: list[_Piece] = []
        """In the order in which they came free."""
        self._back: deque[_Piece] = deque()
        """Filled by finalizers, which may run anywhere, so without a lock."""
        self._lock = threading.Lock()
        self._held = self._most_used = 0

    @property
    def free_bytes(self) -> int:
        """Held, and in nobody's use."""
        return _touched((*self._free, *self._back))

    def empty(self, nbytes: int) -> Bytes:
        """An array (nbytes,) of uint8 with anything in it."""
        if nbytes < LEAST_BYTES:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            while self._back:
                self._free.append(self._back.popleft())
            now_s = self._now()
            if self._free and now_s - self._free[0].since_s > IDLE_S:  # one at a time: it takes the kernel a while
                self._held -= self._free.pop(0).touched
            found = self._fitting(nbytes) or _Piece(_fresh(int(ROOM * nbytes)), 0, now_s)
            piece = found._replace(touched=max(found.touched, nbytes))
            self._held += piece.touched - found.touched
            self._most_used = max(self._most_used, self._held - _touched(self._free))
        # Its base is no array: so numpy keeps this very object alive for every view of it.
        handed: Bytes = np.frombuffer(memoryview(piece.raw)[:nbytes], np.uint8)  # type: ignore[arg-type]  # its stubs
        weakref.finalize(handed, self._came_free, piece).atexit = False
        return handed

    def _came_free(self, piece: _Piece) -> None:
        self._back.append(piece._replace(since_s=self._now()))

    def _fitting(self, nbytes: int) -> _Piece | None:
        """A free one that will do, of all the one with the least to touch or to leave; else makes way for a new one."""
        fitting = [
            (one.touched < nbytes, abs(one.touched - nbytes), -at)  # the last to come free: others may idle away
            for at, one in enumerate(self._free)
            if nbytes <= one.raw.nbytes and one.touched <= ROOM * nbytes
        ]
        if fitting:
            return self._free.pop(-min(fitting)[-1])
        used = self._held - _touched(self._free)
        while self._free and self._held + nbytes > ROOM * max(self._most_used, used + nbytes):
            self._held -= self._free.pop(0).touched
        return None


def _fresh(nbytes: int) -> Bytes:
    """Memory of the kernel's, which has it back as soon as it is let go of: the allocator would keep it."""
    raw = mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)  # of this process alone, as the allocator's is
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that has none
            raw.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(raw, np.uint8)


def _touched(pieces: Iterable[_Piece]) -> int:
    return sum(piece.touched for piece in pieces)


_buffers = Buffers()
"""Of this process, as the allocator is."""


def pooled(elements: int, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """An array (elements,) with anything in it, as `np.empty`."""
    kind = np.dtype(dtype)
    return _buffers.empty(elements * kind.itemsize).view(kind)
