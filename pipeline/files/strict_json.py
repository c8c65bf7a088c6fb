"""JSON output with null in place of NaN and infinities. All JSON of this project is written here. Pure.

Losses and norms of a diverging learner are NaN or infinite. Python's `json` would write `NaN` and `Infinity`, which
other parsers reject.
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
    """Encode like `json.dumps`, with the same options."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def number(value: float | None) -> float:
    """Return a float that was read back: null stands for NaN."""
    return math.nan if value is None else value
