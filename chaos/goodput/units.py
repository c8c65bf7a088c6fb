"""Numbers as people write them: '0.5y', '70B', '5Gbps'. Anything else is left for the validator to refuse."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from pipeline.units import parse_count, scaled

YEAR_S = 365.25 * 86400.0
DAY_S = 86400.0

_SPANS_S: dict[str, int | str] = {
    "": 1,
    "ms": "0.001",
    "s": 1,
    "m": 60,
    "min": 60,
    "h": 3600,
    "d": 86400,
    "y": 31557600,
}
_BITS: dict[str, int | str] = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_span(value: Any) -> Any:
    """'200ms', '10s', '5m', '1h', '30d', '0.5y' or a number of seconds."""
    return scaled(value, "(ms|s|min|m|h|d|y)?", _SPANS_S)


def parse_rate(value: Any) -> Any:
    """'5Gbps', '800Mbit/s' or a number of bits per second."""
    return scaled(value, "([kmgt]?)(?:bps|bit/s)?", _BITS)


Span = Annotated[float, BeforeValidator(parse_span), Field(ge=0, allow_inf_nan=False)]
"""Seconds; accepts '200ms', '10s', '5m', '1h', '30d', '0.5y'."""
Amount = Annotated[float, BeforeValidator(parse_count), Field(gt=0, allow_inf_nan=False)]
"""A count; accepts '70B', '150k', '10e9'."""
BitRate = Annotated[float, BeforeValidator(parse_rate), Field(gt=0, allow_inf_nan=False)]
"""Bits per second; accepts '5Gbps', '800Mbit/s'."""
