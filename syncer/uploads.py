"""How long the uploads of a window's fixed set may take, from measured ones. Pure: times come in as numbers."""

from .grace import Ema

FIRST_UPLOAD_S = 30.0
"""Upload deadline before any upload was measured."""
LEAST_UPLOAD_S = 1.0
"""Room for a learner whose machine is busy; also how long one killed while publishing can hold up a merge."""
UPLOAD_FACTOR = 4.0
"""The upload deadline is this many times the smoothed upload time."""
TIMEOUT_FACTOR = 2.0
"""Uploads that did not end in time lengthen the deadline to so many times what it was at most."""


class UploadEstimator:
    """Estimate of one fragment's upload time."""

    def __init__(self) -> None:
        self._upload = Ema()

    @property
    def upload_s(self) -> float:
        """How long the uploads of a fixed set may take."""
        measured = self._upload.value
        return FIRST_UPLOAD_S if measured is None else max(LEAST_UPLOAD_S, UPLOAD_FACTOR * measured)

    def took(self, seconds: float) -> None:
        """An upload has ended."""
        self._upload.observe(seconds)

    def timed_out(self, waited_s: list[float]) -> None:
        """These did not end in time: a slower network must lengthen the deadline, or nothing would ever pass."""
        most = TIMEOUT_FACTOR * self.upload_s / UPLOAD_FACTOR
        for seconds in waited_s:
            self._upload.observe(min(seconds, most))
