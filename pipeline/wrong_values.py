"""What is wrong with a value that pydantic has refused, in the words of this project."""

from collections.abc import Iterable
from typing import Any

from pydantic import BeforeValidator
from pydantic_core import ErrorDetails

from diloco.pipeline.units import EXAMPLES

_WHOLE, _NUMBER, _SWITCH = "not a whole number", "not a number", "neither true nor false"
_WORDS = {
    "greater_than": ("too small", "more than {gt}"),
    "greater_than_equal": ("too small", "at least {ge}"),
    "less_than": ("too large", "less than {lt}"),
    "less_than_equal": ("too large", "at most {le}"),
    "literal_error": ("no such choice", "{expected}"),
    "enum": ("no such choice", "{expected}"),
    "too_short": ("too short", "at least {min_length}"),
    "string_too_short": ("too short", "at least {min_length} characters"),
    "string_pattern_mismatch": ("not of the form that it takes", ""),
    "string_type": ("not text", ""),
    "path_type": ("not a path", ""),
    "finite_number": ("not a finite number", ""),
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), (_WHOLE, "")),
    **dict.fromkeys(("float_type", "float_parsing"), (_NUMBER, "")),
    **dict.fromkeys(("bool_type", "bool_parsing"), (_SWITCH, "")),
    "missing": ("missing", ""),
    "extra_forbidden": ("unknown", ""),
}
"""By pydantic's name of the error: what is wrong, and what is allowed instead, with the error's context."""


def told(problem: ErrorDetails, takes: str = "", rules: Iterable[Any] = ()) -> str:
    """What is wrong, and what is allowed.

    Args:
        problem: one of pydantic's.
        takes: all that is allowed, in words, if it is known; else the one rule that was broken is named.
        rules: of the field; they may know how its numbers are written.
    """
    said = problem["msg"].removeprefix("Value error, ").rstrip(".")
    wrong, rule = _WORDS.get(problem["type"], (said, ""))
    if wrong == _NUMBER:
        ways = [EXAMPLES[one.func] for one in rules if isinstance(one, BeforeValidator) and one.func in EXAMPLES]
        wrong += "".join(f", such as {way}" for way in ways)
    takes = takes or rule.format(**problem.get("ctx", {}))
    return f"{wrong} (allowed: {takes})" if takes else wrong
