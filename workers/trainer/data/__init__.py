"""Text for the built-in trainer, as tokens."""
