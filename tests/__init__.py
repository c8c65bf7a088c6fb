"""Tests of the whole; each test's name or docstring is a promise."""

HANGING_S = 500.0
"""How long a test waits for what another process or thread does: against hanging only, so that no test depends on how
busy the machine is. Below pytest's own limit, so that whoever waited in vain can say for what."""
