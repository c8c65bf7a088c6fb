"""Numbers as people write them: '0.5y', '70B', '5Gbps'. Anything else is left for the validator to refuse."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

YEAR_S = 365.25 * 86400.0
DAY_S = 86400.0

_SPANS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": DAY_S, "y": YEAR_S}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NUMBER = r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*"


def _scaled(value: Any, suffix: str, units: dict[str, float]) -> Any:
    if isinstance(value, str) and (match := re.fullmatch(_NUMBER + suffix, value.strip(), re.IGNORECASE)):
        unit = units.get((match[2] or "").lower())
        try:
            return value if unit is None else float(match[1]) * unit
        except ValueError:  # '1.2.3'
            return value
    return value


def parse_span(value: Any) -> Any:
    """'200ms', '10s', '5m', '1h', '30d', '0.5y' or a number of seconds."""
    return _scaled(value, "(ms|s|min|m|h|d|y)?", _SPANS_S)


def parse_count(value: Any) -> Any:
    """'70B', '150k', '10e9' or a plain number."""
    return _scaled(value, "([kmbt]?)", _COUNTS)


def parse_rate(value: Any) -> Any:
    """'5Gbps', '800Mbit/s' or a number of bits per second."""
    return _scaled(value, "([kmgt]?)(?:bps|bit/s)?", _BITS)


Span = Annotated[float, BeforeValidator(parse_span), Field(ge=0, allow_inf_nan=False)]
"""Seconds; accepts '200ms', '10s', '5m', '1h', '30d', '0.5y'."""
Amount = Annotated[float, BeforeValidator(parse_count), Field(gt=0, allow_inf_nan=False)]
"""A count; accepts '70B', '150k', '10e9'."""
BitRate = Annotated[float, BeforeValidator(parse_rate), Field(gt=0, allow_inf_nan=False)]
"""Bits per second; accepts '5Gbps', '800Mbit/s'."""
