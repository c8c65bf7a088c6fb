"""Messages about values that pydantic has refused, and about the values that a field takes."""

from typing import Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from diloco.pipeline.units import EXAMPLES, written

_WHOLE, _NUMBER, _SWITCH = "not a whole number", "not a number", "neither true nor false"
# By pydantic's error type: what is wrong, and what is allowed instead, to be formatted with the error's context.
_WORDS = {
    "greater_than": ("too small", "more than {gt}"),
    "greater_than_equal": ("too small", "at least {ge}"),
    "less_than": ("too large", "less than {lt}"),
    "less_than_equal": ("too large", "at most {le}"),
    "literal_error": ("not a valid choice", "{expected}"),
    "enum": ("not a valid choice", "{expected}"),
    "too_short": ("too short", "at least {min_length}"),
    "string_too_short": ("too short", "at least {min_length} characters"),
    "string_pattern_mismatch": ("not in the expected format", ""),
    "string_type": ("not text", ""),
    "path_type": ("not a path", ""),
    "is_instance_of": ("not of the expected type", "{class}"),
    "finite_number": ("not a finite number", ""),
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), (_WHOLE, "")),
    **dict.fromkeys(("float_type", "float_parsing"), (_NUMBER, "")),
    **dict.fromkeys(("bool_type", "bool_parsing"), (_SWITCH, "")),
    "missing": ("missing", ""),
    "extra_forbidden": ("unknown", ""),
}

OTHERS = "a different build may"
# The most characters of a number that are shown.
LONGEST = 40


def allowed(field: FieldInfo) -> str:
    """Return in words which values a field takes. Of several bounds on one side the tightest counts."""
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(field.annotation)))

    def bounds(**words: str) -> list[tuple[Any, str]]:
        """Return the bounds that the field has, each with its words."""
        found = ((getattr(rule, name, None), word) for name, word in words.items() for rule in field.metadata)
        return [one for one in found if one[0] is not None]

    least, most = bounds(gt="more than {}", ge="at least {}"), bounds(lt="less than {}", le="at most {}")
    # Sorting is stable, so of two equal bounds the strict one (gt, lt) wins: it was listed first.
    closest = [*sorted(least, key=lambda one: -one[0])[:1], *sorted(most, key=lambda one: one[0])[:1]]
    closest += bounds(min_length="at least {} characters")
    return ", ".join(word.format(_readable(bound)) for bound, word in closest)


def _readable(bound: Any) -> Any:
    """Return a bound for display: numbers that few people can read as powers, such as 2^62 and 10^18."""
    if isinstance(bound, int) and bound >= 10**15 and bound == 10 ** (len(str(bound)) - 1):
        return f"10^{len(str(bound)) - 1}"
    if isinstance(bound, int) and bound >= 2**53 and not (bound & (bound + 1) and bound & (bound - 1)):
        return f"2^{bound.bit_length()} - 1" if bound & 1 else f"2^{bound.bit_length() - 1}"
    return written(bound) if isinstance(bound, float) else bound


def _is_nan(value: Any) -> bool:
    """Return whether a number, or its text, is NaN, which no bound admits."""
    return bool(value != value or (isinstance(value, str) and value.strip().lower() == "nan"))


def format_problem(problem: ErrorDetails, field: FieldInfo | None = None) -> str:
    """Return what is wrong with a value, and what is allowed.

    field: the field of the value. None: it is not known, and only the rule that was broken is named.
    """
    said = problem["msg"].removeprefix("Value error, ").replace("Input should be", "not").rstrip(".")
    wrong, rule = _WORDS.get(problem["type"], (said, ""))
    if problem["type"] == "string_too_short" and problem["ctx"]["min_length"] == 1:
        return "empty"
    if wrong in ("too small", "too large") and _is_nan(problem["input"]):
        wrong = _NUMBER
    if field is None:
        takes = rule.format(**{name: _readable(one) for name, one in problem.get("ctx", {}).items()})
    else:
        if wrong == _NUMBER:
            read = [rule.func for rule in field.metadata if isinstance(rule, BeforeValidator)]
            wrong += "".join(f", such as {EXAMPLES[one]}" for one in read if one in EXAMPLES)
        # A regular expression means little to most people: the field's description says more.
        takes = str(field.description) if problem["type"] == "string_pattern_mismatch" else allowed(field)
    return f"{wrong} (allowed: {takes})" if takes else wrong


def complaint(error: ValidationError) -> str:
    """Return what is wrong with a message or a file, and whether another build may have written it."""
    first = error.errors(include_url=False)[0]
    where, what = ".".join(str(part)[:80] for part in first["loc"]), format_problem(first)[:400]
    if first["type"] == "literal_error" and where.endswith("format"):
        number, reads = repr(first["input"]), first.get("ctx", {}).get("expected")
        number = number if len(number) <= LONGEST else f"{number[:LONGEST]}..."
        return f"{where} {number} cannot be read by this build, which reads {reads}: {OTHERS} have written it"
    if first["type"] in ("literal_error", "enum", "union_tag_invalid"):
        value = first.get("ctx", {}).get("tag", first["input"])
        return f"{where or 'message'} {value!r:.40} is unknown to this build: {OTHERS} have written it"
    if first["type"] == "extra_forbidden":
        return f"{where or 'message'} is unknown to this build: {OTHERS} have written it"
    return f"{where}: {what}" if where else what
