"""Numbers as people write them: '2.5M', '4e3', '200ms'. Anything else is left for the validator to refuse."""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

_COUNTS: dict[str, int | str] = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_UNITS_S: dict[str, int | str] = {"": 1, "ms": "0.001", "s": 1, "m": 60, "h": 3600}
_NUMBER = r"\s*([0-9.]+(?:e[+-]?[0-9]{1,2})?)\s*"


def scaled(value: Any, suffix: str, units: Mapping[str, int | str]) -> Any:
    """The number before a unit times what the unit stands for, an int if it is whole.

    Args:
        value: text, or anything else, which stays as it is.
        suffix: pattern of the units, with one group.
        units: name in lower case -> an integer, or a decimal fraction.
    """
    if not isinstance(value, str) or not (match := re.fullmatch(_NUMBER + suffix, value.strip(), re.IGNORECASE)):
        return value
    unit = units.get((match[2] or "").lower())
    try:
        number = value if unit is None else Decimal(match[1]) * Decimal(unit)  # 2.3 x 1e6 is no whole float
    except InvalidOperation:  # '1.2.3'
        return value
    return number if not isinstance(number, Decimal) else int(number) if number == int(number) else float(number)


def parse_count(value: Any) -> Any:
    """'2.5M', '4e3', '70B', '150k' or a plain number: k, M, B and T are 10^3, 10^6, 10^9 and 10^12."""
    return scaled(value, "([kmbt]?)", _COUNTS)


def parse_duration(value: Any) -> Any:
    """'200ms', '10s', '5m', '1h' or a number of seconds."""
    return scaled(value, "(ms|s|m|h)?", _UNITS_S)
