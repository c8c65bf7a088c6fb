"""JSON for other programs."""

import json
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """As `json.dumps`, but null for what JSON has no number for, such as the loss of a run that diverged."""
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(finite, indent=indent, allow_nan=False)
