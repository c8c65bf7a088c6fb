"""Numbers in the notation that people use: '2.5M', '200ms', '0.5y', '5Gbps'.

Parsers return anything else unchanged, for the validator to refuse.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

YEAR_S = 365.25 * 86400.0
MAX_S = 10_000 * YEAR_S

_COUNTS: dict[str, int | str] = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_NUMBER = r"\s*([0-9.]+(?:e[+-]?[0-9]{1,2})?)\s*"


def scaled(value: Any, suffix: str, units: Mapping[str, int | str]) -> Any:
    """Return the number times its unit, as an int if it is whole.

    Args:
        value: text; anything else is returned unchanged.
        suffix: regular expression of the units, with one group.
        units: unit in lower case -> its factor, an integer or a decimal fraction.
    """
    if not isinstance(value, str) or not (match := re.fullmatch(_NUMBER + suffix, value.strip(), re.IGNORECASE)):
        return value
    unit = units.get((match[2] or "").lower())
    try:
        number = value if unit is None else Decimal(match[1]) * Decimal(unit)  # a float 2.3 * 1e6 is not whole
    except InvalidOperation:  # '1.2.3'
        return value
    return number if not isinstance(number, Decimal) else int(number) if number == int(number) else float(number)


def parse_count(value: Any) -> Any:
    """Parse '2.5M', '4e3', '70B', '150k' or a plain number: k, M, B (or G) and T are 10^3, 10^6, 10^9, 10^12."""
    return scaled(value, "([kmbgt]?)", _COUNTS)


def parse_whole(value: Any) -> Any:
    """Parse text as a whole number in the notation of `parse_count`; anything but text is returned unchanged.

    Raises:
        ValueError: the text is not a whole number.
    """
    if not isinstance(value, str):
        return value
    try:
        return int(str(parse_count(value)))
    except ValueError:
        raise ValueError("not a whole number, such as 4000, 4e3 or 2.5M") from None


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
    """Parse '200ms', '10s', '5m', '1h', '30d', '0.5y' or a number of seconds."""
    return scaled(value, "(ms|s|min|m|h|d|y)?", _SPANS_S)


def parse_rate(value: Any) -> Any:
    """Parse '5Gbps', '800Mbit/s' or a number of bits per second.

    Raises:
        ValueError: the text is none of them.
    """
    read = scaled(value, "([kmgt]?)(?:bps|bit/s)?", _BITS)
    if isinstance(read, str) and not re.fullmatch(r"\s*[+-]?[0-9.]+\s*|nan|[+-]?inf", read, re.IGNORECASE):
        raise ValueError("not a rate in bits per second, such as 5Gbps or 800Mbit/s")
    return read


# By parser: examples of its notation, for messages.
EXAMPLES: dict[Any, str] = {
    parse_count: "150k, 2.5M or 70B",
    parse_span: "200ms, 10s, 5m or 30d",
    parse_rate: "5Gbps or 800Mbit/s",
}


def written(amount: float, suffixes: str = "TBMk") -> str:
    """Format a number to six digits: '70B', '3.3B', '150k', '0.5'. For rates pass 'TGMk'."""
    for suffix, unit in zip(suffixes, (1e12, 1e9, 1e6, 1e3), strict=True):
        if abs(amount) >= unit:
            return f"{amount / unit:g}{suffix}"
    return f"{amount:g}"


def as_bytes(amount: float) -> str:
    """Format a number of bytes: '250MB'."""
    return written(float(f"{amount:.3g}"), "TGMk") + "B"


def as_maxmemory(amount: float) -> str:
    """Format a number of bytes as Redis reads it: '2500mb', in units of 2^20 bytes, rounded up."""
    return f"{math.ceil(amount / 2**20)}mb"


def as_rate(bytes_per_s: float) -> str:
    """Format bytes per second as a bit rate: '83Mbit/s'."""
    return written(float(f"{8 * bytes_per_s:.3g}"), "TGMk") + "bit/s"


# Seconds; accepts '200ms', '10s', '5m', '1h', '30d', '0.5y'.
Span = Annotated[float, BeforeValidator(parse_span), Field(ge=0, allow_inf_nan=False)]
# A count; accepts '70B', '150k', '10e9'.
Amount = Annotated[float, BeforeValidator(parse_count), Field(gt=0, allow_inf_nan=False)]
# Bits per second; accepts '5Gbps', '800Mbit/s'.
BitRate = Annotated[float, BeforeValidator(parse_rate), Field(gt=0, allow_inf_nan=False)]


def duration(seconds: float | None) -> str:
    """Format seconds as '1:02:03' or '2:03'; '-' for None, NaN, and anything longer than ten thousand years."""
    if seconds is None or not abs(seconds) <= MAX_S:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: float) -> str:
    """Format a number as '950', '12.3k', '2.50M'."""
    for limit, suffix, digits in ((1e9, "G", 2), (1e6, "M", 2), (1e4, "k", 1)):
        if number >= limit:
            return f"{number / (1e3 if suffix == 'k' else limit):.{digits}f}{suffix}"
    return f"{number:.0f}"


def counted(number: int, what: str) -> str:
    """Format a number with a noun: '1 learner', '2 learners', '0 learners'."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
