"""Log set-up of a process: readable on a terminal, one JSON object a line anywhere else."""

import sys
from typing import Any, TextIO

import structlog

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.process.output import outlive_errors_reader


def configure(level: str, stream: TextIO | None = None) -> None:
    """Send structlog's lines to `stream` (default: standard error).

    Args:
        level: least severe line shown: debug, info, warning or error.
        stream: where to; a terminal gets colours and aligned columns, the rest JSON with UTC times.
    """
    outlive_errors_reader()
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
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, *output],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=False,  # tests configure again, and a line is rare
    )
