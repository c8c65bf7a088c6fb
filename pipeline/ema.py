"""Measured times, smoothed. Pure: whoever measures has the clock."""


class Ema:
    """Exponential moving average that starts at its first observation."""

    def __init__(self, decay: float) -> None:
        """decay: share of the old average that each observation leaves, below 1."""
        self.decay = decay
        self.value: float | None = None

    def observe(self, value: float) -> float:
        """One more; the average with it."""
        self.value = value if self.value is None else self.decay * self.value + (1 - self.decay) * value
        return self.value
