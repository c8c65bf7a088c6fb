"""Logging of a process: readable lines on a terminal, one JSON object per line anywhere else."""

import sys
import time
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.process.output import survive_closed_stderr

# Events of `outage_event`. Each task of a party meets an outage on its own and retries several times per second, so the
# same line would be repeated very often.
OUTAGES = frozenset({"bus_unavailable", "bus_full", "scripts_missing", "data_unreadable"})
# A line about a continuing outage is repeated at most this often.
OUTAGE_AGAIN_S = 10.0


class _OutagesOnce:
    """Drops a line about an outage if the same line was logged less than `OUTAGE_AGAIN_S` ago."""

    def __init__(self) -> None:
        self._said_s: dict[tuple[Any, ...], float] = {}

    def __call__(self, logger: Any, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if line["event"] not in OUTAGES:
            return line
        now_s, what = time.monotonic(), (line["event"], line.get("learner"), line.get("error"))
        self._said_s = {one: said_s for one, said_s in self._said_s.items() if now_s - said_s < OUTAGE_AGAIN_S}
        if what in self._said_s:
            raise structlog.DropEvent
        self._said_s[what] = now_s
        return line


def configure(level: str, stream: TextIO | None = None) -> None:
    """Send structlog's lines to `stream` (default: standard error). Repeated lines about an outage are dropped.

    Args:
        level: least severe level shown: debug, info, warning or error.
        stream: the output; a terminal gets colours and aligned columns, anything else JSON with UTC times.
    """
    survive_closed_stderr()
    target = sys.stderr if stream is None else stream
    output: list[Any]
    if target.isatty():
        output = [structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False), structlog.dev.ConsoleRenderer()]
    else:
        output = [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(dumps, default=repr),
        ]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _OutagesOnce(),
            structlog.processors.add_log_level,
            *output,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=False,  # tests configure again, and lines are rare enough
    )
