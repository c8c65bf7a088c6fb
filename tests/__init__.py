"""Tests of the whole; each test's name or docstring is a promise."""

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import structlog

HANGING_S = 500.0
"""How long a test waits for what another process or thread does: against hanging only, so that no test depends on how
busy the machine is. Below pytest's own limit, so that whoever waited in vain can say for what."""


def quiet() -> None:
    """No log lines: in a world there are thousands of outages."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def slow_beyond(quick: int, values: Iterable[Any]) -> list[Any]:
    """What to parametrize a test with: `make test` tries the first ones, `make test-all` the others too."""
    given = [one if isinstance(one, tuple) else (one,) for one in values]
    return [pytest.param(*one, marks=[pytest.mark.slow] if at >= quick else []) for at, one in enumerate(given)]
