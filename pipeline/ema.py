"""An exponential moving average for measured times. Pure: the caller has the clock."""


class Ema:
    """Exponential moving average that starts at its first observation."""

    def __init__(self, decay: float) -> None:
        """Set `decay`, the weight of the old average at each observation, below 1."""
        self.decay = decay
        self.value: float | None = None

    def observe(self, value: float) -> float:
        """Add an observation and return the new average."""
        self.value = value if self.value is None else self.decay * self.value + (1 - self.decay) * value
        return self.value
