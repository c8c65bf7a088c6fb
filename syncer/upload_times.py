"""How long uploads take, and which of them still make progress. Pure: no clock."""

import math

from diloco.pipeline.ema import Ema
from diloco.pipeline.messages.delta import DeltaHeader
from diloco.syncer.grace import DECAY
from diloco.syncer.membership import LEAST_UPLOAD_S

# Upload deadline before any upload was measured.
FIRST_UPLOAD_S = 30.0
# The upload deadline is this many times the smoothed upload time.
UPLOAD_FACTOR = 4.0
# Uploads that missed the deadline lengthen it by at most this factor.
TIMEOUT_FACTOR = 2.0

# An upload has stopped if nothing came for this many times its last gap between two chunks, or for `TIMEOUT_FACTOR`
# upload deadlines, whichever is shorter.
SILENT_CHUNKS = 4


class UploadEstimator:
    """Estimate of one fragment's upload time: how long the uploads of a window's fixed set may take."""

    def __init__(self) -> None:
        self._upload = Ema(DECAY)

    @property
    def upload_s(self) -> float:
        """Upload deadline, s: how long the uploads of a fixed set may take."""
        measured = self._upload.value
        return FIRST_UPLOAD_S if measured is None else max(LEAST_UPLOAD_S, UPLOAD_FACTOR * measured)

    def observe(self, seconds: float) -> bool:
        """Take the duration of an upload that has ended; return whether it was within the deadline."""
        in_time = seconds <= self.upload_s
        self._upload.observe(seconds)
        return in_time

    def timed_out(self, waited_s: list[float]) -> None:
        """Take how long uploads were waited for in vain, s.

        They must lengthen the deadline: on a network that has become slower, no upload would ever be in time otherwise.
        """
        most = TIMEOUT_FACTOR * self.upload_s / UPLOAD_FACTOR
        for seconds in waited_s:
            self._upload.observe(min(seconds, most))


class UploadProgress:
    """Progress of each learner's uploads, in all fragments of one syncer.

    On each of its lanes a learner uploads its deltas in the order of their serials. So a delta of which nothing has
    come yet is still queued while earlier ones make progress. The silence between two chunks is measured for each
    learner. However long its gaps are, a learner may be silent for at most `TIMEOUT_FACTOR` upload deadlines.
    """

    # Bound of the incarnations that are remembered; the ones that were silent for longest are dropped.
    MOST = 1024

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float, float]] = {}
        """Incarnation -> serial of the delta whose chunk came last, when it came, and the gap before it, s."""

    def heard(self, header: DeltaHeader, now: float) -> None:
        """Note that a chunk of this delta came."""
        serial, at, gap_s = self._last.pop(header.incarnation, (header.serial, now, 0.0))
        self._last[header.incarnation] = header.serial, now, now - at if serial == header.serial else gap_s
        while len(self._last) > self.MOST:
            del self._last[next(iter(self._last))]

    def comes(self, header: DeltaHeader, came_s: float, now: float, upload_s: float) -> bool:
        """Return whether an upload makes progress, or is queued behind earlier ones that do.

        Args:
            header: of the delta.
            came_s: when its last chunk came.
            now: the time.
            upload_s: the upload deadline, s.
        """
        serial, at, gap_s = self._last.get(header.incarnation, (header.serial, -math.inf, 0.0))
        since = now - max(LEAST_UPLOAD_S, min(SILENT_CHUNKS * gap_s, TIMEOUT_FACTOR * upload_s))
        return came_s >= since or (serial < header.serial and at >= since)
