"""A pool for large arrays, whose memory is reused as soon as nothing refers to them.

Fresh memory costs as much as the work done in it, because the kernel clears each page when it is first touched. There
is no call to return memory: an array's memory is free once the array and all views of it are gone. The pool holds at
most a quarter more than was ever in use at once, and memory that was unused for a minute goes back to the kernel, one
piece with each request. Fragments differ a little in size, so each array gets address space for one that is a quarter
larger; only pages that were touched take memory.
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

# Smaller arrays are left to numpy's allocator.
MIN_BYTES = 2**20
# Free memory is reused for an array up to this factor larger or smaller. The same factor limits what the pool holds,
# relative to the most ever in use.
ROOM = 1.25
# Longer than any round in which the cost of fresh pages matters: clearing a page once a minute costs nothing.
IDLE_S = 60.0


class _Piece(NamedTuple):
    """A mapping whose first `touched` bytes take memory; the rest is only address space."""

    raw: Bytes
    touched: int
    since_s: float
    """When it was last taken or released."""


class Buffers:
    """A pool that any thread may use."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Create an empty pool; `now` is a clock in seconds, which is also called from finalizers."""
        self._now = now
        self._free: list[_Piece] = []
        """Free pieces, in the order in which they were released."""
        self._back: deque[_Piece] = deque()
        """Pieces released by finalizers, which may run at any point, even while this thread holds the lock. So they
        take no lock and only append here, which is atomic; `empty` collects the pieces."""
        self._lock = threading.Lock()
        self._held = self._peak = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that are held and unused."""
        return _touched((*self._free, *self._back))

    def empty(self, nbytes: int) -> Bytes:
        """Return an uninitialised array (nbytes,) of uint8."""
        if nbytes < MIN_BYTES:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            while self._back:
                self._free.append(self._back.popleft())
            now_s = self._now()
            if self._free and now_s - self._free[0].since_s > IDLE_S:  # one per call: unmapping is slow
                self._held -= self._free.pop(0).touched
            found = self._fitting(nbytes) or _Piece(_fresh(int(ROOM * nbytes)), 0, now_s)
            piece = found._replace(touched=max(found.touched, nbytes))
            self._held += piece.touched - found.touched
            self._peak = max(self._peak, self._held - _touched(self._free))
        # numpy collapses chains of views to the base *array*. The base of `handed` is a memoryview, so every view of it
        # keeps `handed` itself alive, and the finalizer cannot run while any view can still be used.
        handed: Bytes = np.frombuffer(memoryview(piece.raw)[:nbytes], np.uint8)  # type: ignore[arg-type]  # numpy's stubs
        weakref.finalize(handed, self._came_free, piece).atexit = False
        return handed

    def _came_free(self, piece: _Piece) -> None:
        self._back.append(piece._replace(since_s=self._now()))

    def _fitting(self, nbytes: int) -> _Piece | None:
        """Remove and return the free piece that fits best; if none fits, release memory to make way for a new one.

        The best piece needs no untouched pages, and is closest in size.
        """
        fitting = [
            (one.touched < nbytes, abs(one.touched - nbytes), -at)  # ties: the last released, so that others idle
            for at, one in enumerate(self._free)
            if nbytes <= one.raw.nbytes and one.touched <= ROOM * nbytes
        ]
        if fitting:
            return self._free.pop(-min(fitting)[-1])
        used = self._held - _touched(self._free)
        while self._free and self._held + nbytes > ROOM * max(self._peak, used + nbytes):
            self._held -= self._free.pop(0).touched
        return None


def _fresh(nbytes: int) -> Bytes:
    """Map memory that returns to the kernel as soon as it is released; the allocator would keep it."""
    raw = mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)  # private to this process
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            raw.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(raw, np.uint8)


def _touched(pieces: Iterable[_Piece]) -> int:
    return sum(piece.touched for piece in pieces)


# One pool per process, like the allocator.
_buffers = Buffers()


def pooled(elements: int, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """Return an uninitialised array (elements,), like `np.empty`, from the process's pool."""
    kind = np.dtype(dtype)
    return _buffers.empty(elements * kind.itemsize).view(kind)
