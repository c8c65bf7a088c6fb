"""The one way to write JSON: what is not a number there (NaN, infinity) becomes null. Pure.

Losses and norms of a learner that diverges are NaN or infinite. Python's own `json` writes words for them that no
other parser takes.
"""

import json
import math
from typing import Any


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def dumps(value: Any, **options: Any) -> str:
    """As `json.dumps`, with its options."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def number(value: float | None) -> float:
    """A float that was written so, read again: null was not a number."""
    return math.nan if value is None else value
