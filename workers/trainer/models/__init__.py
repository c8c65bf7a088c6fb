"""Models of the built-in trainer."""
